"""The configuration: parsed and validated once, then passed down, never read from the environment.

The fields of :class:`OffloadConfig` are the table of all keys, by which msgspec checks values, and which
docs/reference/configuration.md shows.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from sglang_scout.core.cpu_list import parse_cpu_list
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.files import check_different, check_writable

PAGE_SIZE_TOKENS = 32
"""Page size that ``--kv-offload`` implies (the paper's block size)."""

DIGESTS = ("minmax", "rotated-2", "calibrated")
"""Page digests to choose from; see ``engine/digest_kinds.py``."""

DEFAULT_DIGEST = "rotated-2"
DEFAULT_BUDGET_TOKENS = 1024
"""Half of the paper's (section 4.3), at a smaller loss with the default digest (docs/results/real_model.md)."""

DEFAULT_HOST_SHARE = 0.5
"""Share of the available memory that KV pages take when --kv-offload-host-gb is not given."""

DEFAULT_RECALL_THRESHOLD = 0.12
"""The paper's β: the CPU compute ratio that no layer should exceed (section 3.4)."""

MAX_BUDGET_TOKENS = 2**40
LARGE = 2**30
"""Limits from here on only keep out what no machine has; the documents leave them out."""

FLAGS = {
    "policy": "--kv-offload",
    "budget_tokens": "--kv-offload-budget",
    "host_gb": "--kv-offload-host-gb",
    "recall_profile": "--kv-offload-recall-profile",
    "cpus": "--kv-offload-cpus",
    "config": "--kv-offload-config",
}
"""Names of the arguments of `parse_config`, in messages."""

Layer = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class Key:
    """A key of ``--kv-offload-config``: metadata of a field of :class:`OffloadConfig`.

    Attributes:
        help: what it does and when to change it, as in docs/reference/configuration.md; ``Default: …`` at its end says
            how a default is computed.
        limits: of a number.
        choices: of a string; without them it names a file.
        is_written: the server writes that file.
        needs: another key and its value without which this one has no effect.
        is_general: False: only for policies that have it among their defaults.
        is_public: False: for tests and measurements, not in user documents.
        kind, default: of the field.
    """

    help: str
    limits: Meta | None = None
    choices: tuple[str, ...] = ()
    is_written: bool = False
    needs: tuple[str, Any] | None = None
    is_general: bool = True
    is_public: bool = True
    kind: Any = None
    default: Any = None

    @property
    def accepted(self) -> Any:
        """The type of its values, for msgspec."""
        if self.choices:
            return Literal[self.choices]
        return self.kind if self.limits is None else Annotated[self.kind, self.limits]

    @property
    def values(self) -> str:
        """Its values in words."""
        if self.choices:
            return ", ".join(self.choices)
        if self.limits is None:
            return {bool: "true, false", str: "a file"}.get(self.kind, "a list of layers")
        if self.limits.multiple_of is not None:
            return f"multiples of {self.limits.multiple_of}"
        low, high = self.limits.ge, self.limits.le
        is_open = high is None or high >= LARGE
        return f"{low:g} or more" if is_open else f"{low:g} to {high:g}"


def _key(default: Any, help: str, *args: Any, **rules: Any) -> Any:
    return field(default=default, metadata={"key": Key(help, *args, **rules)})


_for_tests = partial(_key, is_public=False)
_of_policies = partial(_key, is_general=False)


@dataclass(frozen=True)
class OffloadConfig:
    """The validated configuration: the server flags, then the keys of ``--kv-offload-config``."""

    policy: str = "none"
    budget_tokens: int = DEFAULT_BUDGET_TOKENS
    host_gb: float | None = None
    recall_profile: str | None = None
    cpus: tuple[int, ...] | None = None
    page_size_tokens: int = PAGE_SIZE_TOKENS

    resident_tokens: int | None = _key(
        None,
        "Size of the device's cache of resident pages, in tokens over all requests. Raise it if the CPU compute ratio "
        "stays high. Lower it to leave memory to digests, and so to more host pages; more work "
        "then stays with the CPU. Default: on the CPU device the budget times `--max-running-requests`; on a CUDA "
        "device what the digests leave",
        Meta(ge=PAGE_SIZE_TOKENS, le=2**40, multiple_of=PAGE_SIZE_TOKENS),
    )
    digest: str = _key(
        DEFAULT_DIGEST,
        "Summary of each page from which pages are selected. `minmax`, the paper's, takes 0.4 of the memory of "
        "`rotated-2`, but finds the important pages less well (measured on one small model). `calibrated` takes 0.6 "
        "and needs `digest_file`. Give the same to both servers",
        choices=DIGESTS,
    )
    mass: float = _key(
        1.0,
        "Share of the attention mass that the selected pages should hold, as the digests estimate it. Below 1, a "
        "layer selects no more pages than it needs for that share, which saves CPU time and copies and costs "
        "accuracy. Has no effect on a request that fits the budget",
        Meta(ge=0.01, le=1.0),
        needs=("grain", "layer"),
    )
    exact_layers: tuple[Layer, ...] = _key(
        (),
        "Layers that select pages with their real query and then wait for CPU attention. If accuracy suffers, list "
        "the layers that `sglang-scout profile` shows with a cosine below 0.8: their queries are predicted poorly",
        needs=("precompute", True),
    )
    recall: str = _key(
        "adaptive",
        "When a layer copies its missing pages to the device. `adaptive`: when its CPU compute ratio would exceed "
        "`recall_threshold`. `fixed`: at the intervals of `--kv-offload-recall-profile`, or without a profile every "
        "`recall_interval` steps. `off`: only a new request's first pages. Serve with `adaptive`; the others are for "
        "a stable workload or for comparison",
        choices=("off", "fixed", "adaptive"),
    )
    recall_interval: int = _key(
        8,  # the paper's profiled mean is 8.7
        "Steps between two recalls of a layer with `recall: fixed`. With `adaptive` it is only the first estimate. A "
        "profile's intervals take its place",
        Meta(ge=1, le=2**31),
    )
    recall_threshold: float | None = _key(
        None,
        "CPU compute ratio that no layer should exceed with `adaptive` (the paper's β). Lower it to move work from "
        "the CPU to the link, raise it if steps wait for recalls. Default: the profile's threshold, or "
        f"{DEFAULT_RECALL_THRESHOLD} without a profile",
        Meta(ge=0.0, le=1.0),
    )
    recall_step_mib: float = _key(
        256.0,  # half of the paper's 20 ms at 25 GB/s
        "Most MiB that `adaptive` copies in one step, on each rank. Choose half of what the link copies in the time "
        "of a step; lower it if steps wait for recalls",
        Meta(ge=0.001, le=2**30),
    )
    prefill_digests: bool = _key(
        True,
        "Whether the prefill server computes the digests and sends them with the KV. If false, the decode server "
        "computes them when the KV arrives. For the prefill server only",
    )
    trace: str | None = _key(
        None,
        "File for a timeline of the first 64 decode steps in Chrome's trace format, which ui.perfetto.dev opens",
        is_written=True,
    )
    step_log: str | None = _key(
        None,
        "File for a JSON line per decode step: missing pages by layer and request, waits, recalls, and how well "
        "queries were predicted. `sglang-scout report` and `sglang-scout profile` read it. It grows without limit",
        is_written=True,
    )

    paper: bool = _of_policies(
        False,
        "The paper's choices: `digest: minmax`, `recall: fixed`, and results of CPU attention merged as computed "
        "with the predicted query. To compare with the paper; give it to both servers, with `--kv-offload-budget "
        "2048`",
    )
    page_checksums: bool = _of_policies(
        False,
        "A checksum for every full page, verified at each read: a request whose KV has changed in host memory ends "
        "with an error instead of wrong tokens. Costs CPU time at each read. For the decode server",
    )
    hgca_beta: float = _of_policies(
        1.0,
        "A head keeps a token whose attention weight exceeds this multiple of the mean weight. Lower it to keep more",
        Meta(ge=0.0),
    )
    hgca_alpha: float = _of_policies(
        0.1,
        "Weight of the newest step in the moving average of attention weights",
        Meta(ge=0.0, le=1.0),
    )
    context_cap_tokens: int | None = _of_policies(
        None,
        "Most tokens that a head of a layer keeps for a request. Default: as many as fit",
        Meta(ge=1, le=2**31),
    )
    forecast_file: str | None = _of_policies(
        None,
        "Weights that select pages one layer ahead, made by `scripts/train_forecast.py --kind forecast`. Required; "
        "give it to both servers",
    )
    pilot_file: str | None = _of_policies(
        None,
        "Weights of page embeddings, made by `scripts/train_forecast.py --kind pilot`. Required; give it to both "
        "servers",
    )
    digest_file: str | None = _of_policies(
        None,
        "Coordinates of `calibrated` digests for one model, made by `scripts/train_forecast.py --kind digest`. "
        "Implies `digest: calibrated`; give it to both servers",
        needs=("digest", "calibrated"),
    )

    context_share: float = _for_tests(
        0.0, "Memory for kept tokens, as a share of the host pages'", Meta(ge=0.0, le=1.0)
    )
    grain: str = _for_tests(
        "layer", "Who selects pages: all heads of a layer, or each", choices=("layer", "head")
    )
    sink_pages: int = _for_tests(1, "First pages that are always selected", Meta(ge=0, le=2**20))
    recent_pages: int = _for_tests(
        1, "Newest full pages that are always selected", Meta(ge=0, le=2**20)
    )
    reweigh: bool = _for_tests(
        True, "Re-weight the CPU's part by the digests' estimate for the real query"
    )
    precompute: bool = _for_tests(True, "False: missing pages wait for the real query")
    transport: str = _for_tests(
        "auto", "Who posts missing pages: the host, or kernels", choices=("auto", "host", "graph")
    )
    verify: bool = _for_tests(False, "Compare every layer with fp32 attention over host pages")
    dummy_kv: bool = _for_tests(False, "With the fake transfer backend: pages of seeded noise")
    trace_steps: int = _for_tests(64, "Steps that the trace keeps", Meta(ge=1, le=10**6))

    @property
    def budget_pages(self) -> int:
        """Pages selected per list, step and layer: the k of top-k."""
        return self.budget_tokens // self.page_size_tokens

    def lists(self, num_kv_heads: int) -> int:
        """Selection lists of a request in a layer."""
        return num_kv_heads if self.grain == "head" else 1

    def of_rank(self, rank: int) -> OffloadConfig:
        """The same for a tensor-parallel rank: from rank 1 on it writes to files with ``.rankN`` before the suffix."""
        if rank == 0:
            return self
        paths = {key: Path(value) for key in WRITTEN_KEYS if (value := getattr(self, key))}
        own = {key: str(p.with_name(f"{p.stem}.rank{rank}{p.suffix}")) for key, p in paths.items()}
        return dataclasses.replace(self, **own)


def _kind(hint: Any) -> Any:
    """The type of a field without its None."""
    kinds = get_args(hint)
    return kinds[0] if NoneType in kinds else hint


_HINTS = get_type_hints(OffloadConfig, include_extras=True)
KEYS: dict[str, Key] = {
    f.name: dataclasses.replace(f.metadata["key"], kind=_kind(_HINTS[f.name]), default=f.default)
    for f in dataclasses.fields(OffloadConfig)
    if "key" in f.metadata
}
PUBLIC_KEYS = tuple(name for name, key in KEYS.items() if key.is_public and key.is_general)
WRITTEN_KEYS = tuple(name for name, key in KEYS.items() if key.is_written)

# Command-line values are typed already; values from Python may be anything.
_FLAG_TYPES: dict[str, tuple[Any, str]] = {
    "policy": (str, "the name of a policy, for example 'scout'"),
    "budget_tokens": (int, f"a whole number of tokens, for example {DEFAULT_BUDGET_TOKENS}"),
    "host_gb": (int | float, "a number of GiB, for example 64.0"),
    "recall_profile": (str, "the name of a file, or leave it out"),
    "cpus": (str, "a list as text, for example '0-3,8'"),
    "config": (str | Mapping, "a JSON object as text or as a dict, or '@FILE'"),
}


def load_json(text: str) -> dict[str, Any]:
    """The object in ``text``, or in the file if ``text`` is ``@FILE``; a ConfigError names the flag and the value."""
    shown = text if text.startswith("@") else text[:60]
    given, what = f"{FLAGS['config']} {shown!r}", "cannot read the file"
    example = "write for example '{\"recall_interval\": 8}' or @FILE"
    try:
        source = Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
        what = "not valid JSON"
        value = json.loads(source, object_pairs_hook=_without_repeats)
    except (OSError, RecursionError, ValueError) as error:  # also: a number of too many digits
        raise ConfigError(f"{given}: {what}: {error}; {example}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{given}: expected a JSON object, got {type(value).__name__}; {example}")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key occurs twice in {[name for name, _ in pairs]}")
    return found


def _check_value(name: str, value: Any) -> Any:
    """One entry of ``--kv-offload-config``, checked against the table of keys."""
    flag = FLAGS["config"]
    if name not in KEYS:
        near = difflib.get_close_matches(str(name), KEYS, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(PUBLIC_KEYS)}"
        raise ConfigError(f"{flag}: unknown key {name!r} (value {value!r}); {hint}")
    key, what = KEYS[name], f"{flag}: {name} = {value!r}"
    try:
        checked = msgspec.convert(value, key.accepted)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ConfigError(f"{what}: {error}; it takes {key.values}") from None
    if key.is_written and not (value and value.isprintable()):
        raise ConfigError(f"{what}: not a file name; name a file, or drop the key")
    return checked


def idle_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Keys without effect given the other ``values``, each with the setting that makes it idle.

    Recall keys are exempt, so that recall can be switched off for comparison with the rest unchanged.
    """
    return {
        name: f"{key.needs[0]} = {json.dumps(found)}"
        for name, key in KEYS.items()
        if key.needs
        and (found := values.get(key.needs[0], KEYS[key.needs[0]].default)) != key.needs[1]
    }


def check_layers(config: OffloadConfig, num_layers: int) -> None:
    """Refuse layers that the model does not have."""
    if max(config.exact_layers, default=0) >= num_layers:
        raise ConfigError(
            f"{FLAGS['config']}: exact_layers = {list(config.exact_layers)}: the model has layers 0 to "
            f"{num_layers - 1}; name some of these, or drop the key"
        )


def _written_files(config: OffloadConfig) -> dict[str, str]:
    """Files to write, by flag, key and value."""
    paths = {key: path for key in WRITTEN_KEYS if (path := getattr(config, key)) is not None}
    return {f"{FLAGS['config']}: {key} = {path!r}": path for key, path in paths.items()}


def check_files(config: OffloadConfig) -> None:
    """Refuse files that cannot be written, by opening them, in the process that uses them. Their contents are kept."""
    for what, path in _written_files(config).items():
        check_writable(what, path)


def _check_flag_type(name: str, value: Any) -> None:
    flag, (kind, expected) = FLAGS[name], _FLAG_TYPES[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        what = f"is of type {type(value).__name__}"
        raise ConfigError(f"{flag} {value!r}: {what}; expected {expected}")
    if value == "" and name != "config":  # not JSON, reported below
        raise ConfigError(f"{flag} {value!r}: is empty; expected {expected}")


def _check_budget(budget_tokens: int) -> None:
    page = PAGE_SIZE_TOKENS
    if not 0 < budget_tokens <= MAX_BUDGET_TOKENS or budget_tokens % page:
        nearest = (budget_tokens + page // 2) // page * page
        least = (OffloadConfig.sink_pages + OffloadConfig.recent_pages) * page
        raise ConfigError(
            f"{FLAGS['budget_tokens']} {budget_tokens}: must be a positive multiple of the page size "
            f"({page} tokens); the nearest is {min(max(least, nearest), MAX_BUDGET_TOKENS)}"
        )


def _check_together(
    config: OffloadConfig, keys: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Values that exclude or need each other."""
    forced = config.sink_pages + config.recent_pages
    if forced > config.budget_pages:
        plural = "" if config.budget_pages == 1 else "s"
        raise ConfigError(
            f"{FLAGS['budget_tokens']} {config.budget_tokens}: holds {config.budget_pages} page{plural}, fewer "
            f"than sink_pages + recent_pages = {forced}; raise it to at least {forced * PAGE_SIZE_TOKENS}"
        )
    for name, cause in idle_keys({**defaults, **keys}).items():
        if name in keys:
            is_said = KEYS[name].needs[0] in keys
            with_what = cause if is_said else f"{FLAGS['policy']} {config.policy}"
            raise ConfigError(
                f"{FLAGS['config']}: {name} = {keys[name]!r} has no effect with {with_what}; drop one of them"
            )
    profile = config.recall_profile
    read = {} if profile is None else {f"{FLAGS['recall_profile']} {profile!r}": profile}
    check_different(read | _written_files(config))


def parse_config(
    *,
    policy: str,
    policies: Mapping[str, Mapping[str, Any]],
    budget_tokens: int | None = None,
    host_gb: float | None = None,
    recall_profile: str | None = None,
    cpus: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    available_cpus: set[int] | None = None,
) -> OffloadConfig:
    """Build the configuration from the flags' raw values.

    Args:
        policy: value of ``--kv-offload``.
        policies: the known ones besides ``none``, each with its overrides of keys' defaults, or with the overrides that
            a key makes if true.
        budget_tokens .. config: raw values of the other flags; ``config`` may be the object itself.
        available_cpus: CPUs of this process; None: ask the kernel.
    Raises:
        ConfigError: a value is wrong, or of a wrong type; the message names flag, value and fix.
    """
    values = policy, budget_tokens, host_gb, recall_profile, cpus, config
    for name, value in zip(_FLAG_TYPES, values, strict=True):
        if value is not None or name == "policy":
            _check_flag_type(name, value)
    if policy != "none" and policy not in policies:
        raise ConfigError(
            f"{FLAGS['policy']} {policy!r}: unknown policy; choose one of none, {', '.join(policies)}"
        )
    defaults = {"budget_tokens": DEFAULT_BUDGET_TOKENS, **policies.get(policy, {})}
    if budget_tokens is not None:
        defaults["budget_tokens"] = budget_tokens
    _check_budget(defaults["budget_tokens"])
    if host_gb is not None and not host_gb > 0:
        raise ConfigError(
            f"{FLAGS['host_gb']} {host_gb}: must be greater than 0; give the GiB for KV pages, or drop the flag"
        )
    raw = load_json(config) if isinstance(config, str) else config or {}
    keys = {name: _check_value(name, value) for name, value in raw.items()}
    for name in keys:
        if not KEYS[name].is_general and name not in defaults:
            owners = [other for other, known in policies.items() if name in known]
            raise ConfigError(
                f"{FLAGS['config']}: {name} = {keys[name]!r} has no effect with {FLAGS['policy']} {policy}; it is for "
                f"{' and '.join(owners)}; drop it"
            )
    for name, changes in policies.get(policy, {}).items():
        if isinstance(changes, Mapping):
            del defaults[name]
            defaults |= changes if keys.get(name) else {}
    result = OffloadConfig(
        policy=policy,
        host_gb=host_gb,
        recall_profile=recall_profile,
        cpus=None if cpus is None else parse_cpu_list(cpus, available_cpus, FLAGS["cpus"]),
        **{**defaults, **keys},
    )
    _check_together(result, keys, defaults)
    return result
