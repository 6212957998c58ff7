"""The one configuration object: parsed and validated once, then passed down, never read from the environment.

Every refusal is a :class:`ConfigError` (a ``ValueError``) that names the flag, the value and the fix.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_scout.core.cpu_list import parse_cpu_list
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.files import check_place, check_writable
from sglang_scout.core.page_bytes import CPU_PAGES

PAGE_SIZE_TOKENS = 32
"""Page size that ``--kv-offload`` implies (the paper's block size)."""

DEFAULT_BUDGET_TOKENS = 2048
"""Sparse budget of the paper's experiments (section 4.3)."""

DEFAULT_HOST_SHARE = 0.5
"""Share of the available memory that KV pages take when --kv-offload-host-gb is not given."""

DEFAULT_RECALL_INTERVAL = 8
"""Steps between two recalls of a layer when no profile is given; the paper's profiled mean is 8.7."""

DEFAULT_RECALL_THRESHOLD = 0.12
"""The paper's β: the CPU compute ratio that no layer should exceed (section 3.4)."""

DEFAULT_RECALL_STEP_MIB = 256.0
"""What one step may copy: half of a step of 20 ms, the paper's window, at 25 GB/s, PCIe 4 x16."""

ATTEND = ("resident", "selected")
DIGESTS = ("minmax", "signs")
HEAD_REDUCTIONS = ("mass", "max", "sum")
PREDICTORS = ("next_layer", "extrapolate", "learned")
RECALL_MODES = ("off", "fixed", "profile", "adaptive")
STEP_ENGINES = ("auto", "host", "device")


@dataclass(frozen=True)
class OffloadConfig:
    """What the user asked for, validated.

    The first block mirrors the server flags, the second the keys of ``--kv-offload-config``.
    """

    policy: str = "none"
    budget_tokens: int = DEFAULT_BUDGET_TOKENS
    host_gb: float | None = None
    recall_profile: str | None = None
    cpus: tuple[int, ...] | None = None

    page_size_tokens: int = PAGE_SIZE_TOKENS
    resident_tokens: int | None = None
    """Device capacity for resident pages over all requests; None: budget x max running requests."""
    sink_pages: int = 1
    recent_pages: int = 1
    """Leading and newest full pages that are always selected and therefore always resident."""
    digest: str = "minmax"
    """What is kept of a page to score it by: bounds (``ops/digest.py``) or signs (``ops/signs.py``)."""
    head_reduce: str = "mass"
    """How the query heads' bounds combine into one score per page, see ``ops/score.py``."""
    resident_bonus: float = 0.0
    """Added to the scores of pages that are on the device already, with digest = signs."""
    attend: str = "resident"
    """What a step attends to: the selected pages and all others that are resident, or the selected alone."""
    precompute: bool = True
    """False: the missing pages are computed in their own layer, from the real query (the paper's ablation)."""
    predictor: str = "next_layer"
    """What a layer's query is predicted from, one layer ahead; see ``policy/predictors.py``."""
    exact_layers: tuple[int, ...] = ()
    """Layers whose query is not predicted: they choose and compute with the real one, without lead."""
    exact_steps: int = 1
    """First steps of a request in which no layer predicts; see ``policy/predictors.py``."""
    predictor_file: str | None = None
    """The learned correction that ``predictor`` = learned needs, see ``core/correction.py``."""
    cpu_pages: str = "model"
    """What the CPU worker reads pages as: the model's dtype, or int8 copies (``core/page_bytes.py``)."""
    recall: str = "adaptive"
    recall_interval: int = DEFAULT_RECALL_INTERVAL
    """Steps between two recalls of a layer: always with fixed recall, at first with adaptive."""
    recall_threshold: float | None = None
    """β; None: the profile's, or DEFAULT_RECALL_THRESHOLD without one."""
    recall_step_mib: float = DEFAULT_RECALL_STEP_MIB
    recall_link_share: float = 0.5
    """Share of a step's time that copies may take once one was late."""
    heat_half_life_steps: float = 8.0
    prefill_digests: bool = True
    """Prefill server: compute page digests and send them with the KV."""
    verify: bool = False
    """Recompute every layer's output in fp32 from the host pages and record the largest relative error."""
    dummy_kv: bool = False
    """With the fake transfer backend: fill the pages of a new request with noise that its prompt seeds."""
    trace: str | None = None
    """File for a Chrome/Perfetto trace of the decode steps."""
    trace_steps: int = 64
    """Steps that the trace keeps; tracing stops by itself after them."""
    quality: str | None = None
    """File for a record of how good the predicted queries are, see ``engine/quality.py``."""
    quality_inputs: int = 0
    """Decoded tokens whose layer inputs are kept beside that file, to fit a ``predictor_file``."""
    step_log: str | None = None
    """File for one JSON line per decode step, see ``engine/step_log.py``."""
    step_engine: str = "auto"
    """Who decides within a step: the host (``engine/step.py``), or nobody (``engine/device_step.py``)."""
    worker_spin_us: int | None = None
    """None: 50, or a whole step's time where records come from a device."""
    worker_threads_per_group: int = 0
    """Threads that share one sequence; 0: as many as there are CPUs for each row of the batch."""
    worker_ready_timeout_s: float = 60.0
    worker_heartbeat_timeout_s: float = 0.8
    worker_wait_timeout_s: float = 10.0

    @property
    def budget_pages(self) -> int:
        """Pages selected per request, layer and step: the k of top-k."""
        return self.budget_tokens // self.page_size_tokens

    @property
    def enabled(self) -> bool:
        return self.policy != "none"

    def of_rank(self, rank: int) -> OffloadConfig:
        """The same for a tensor-parallel rank: from rank 1 on it writes to files of its own, with
        ``.rankN`` before their suffix."""
        if rank == 0:
            return self
        paths = {key: Path(value) for key in _WRITTEN if (value := getattr(self, key)) is not None}
        own = {key: str(p.with_name(f"{p.stem}.rank{rank}{p.suffix}")) for key, p in paths.items()}
        return dataclasses.replace(self, **own)  # type: ignore[arg-type]


_FLAG_FIELDS = {"policy", "budget_tokens", "host_gb", "recall_profile", "cpus", "page_size_tokens"}
_WRITTEN = ("trace", "step_log", "quality")
_FILE_KEYS = (*_WRITTEN, "predictor_file")
_PREDICTION_KEYS = ("predictor", "predictor_file", "exact_layers", "exact_steps")
_RECALL_KEYS = ("recall_interval", "recall_threshold", "recall_step_mib", "recall_link_share")
CONFIG_KEYS = tuple(f.name for f in dataclasses.fields(OffloadConfig) if f.name not in _FLAG_FIELDS)
FLAGS = {
    "policy": "--kv-offload",
    "budget_tokens": "--kv-offload-budget",
    "host_gb": "--kv-offload-host-gb",
    "recall_profile": "--kv-offload-recall-profile",
    "cpus": "--kv-offload-cpus",
    "config": "--kv-offload-config",
}
"""How refusals name the arguments of `parse_config`; a command with flags of its own says them."""

MAX_BUDGET_TOKENS = 2**40

# From the command line values have their types already; from Python they may be anything.
_FLAG_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "policy": ((str,), "the name of a policy, for example 'scout'"),
    "budget_tokens": ((int,), f"a whole number of tokens, for example {DEFAULT_BUDGET_TOKENS}"),
    "host_gb": ((int, float), "a number of GiB, for example 64.0"),
    "recall_profile": ((str,), "the name of a file, or leave it out"),
    "cpus": ((str,), "a list as text, for example '0-3,8'"),
    "config": ((str, Mapping), "a JSON object as text or as a dict, or '@FILE'"),
}
# Smallest and largest value of the numeric keys. A heartbeat is sent every 0.2 s.
_RANGES: dict[str, tuple[float, float]] = {
    "resident_tokens": (PAGE_SIZE_TOKENS, 2**40),
    "recall_interval": (1, 2**31),
    "recall_threshold": (0.0, 1.0),
    "recall_step_mib": (0.001, 2**30),
    "recall_link_share": (0.01, 1.0),
    "heat_half_life_steps": (0.5, 10**6),
    "quality_inputs": (0, 10**6),
    "exact_steps": (0, 10**6),
    "resident_bonus": (0.0, 100.0),
    "trace_steps": (1, 10**6),
    "sink_pages": (0, 2**20),
    "recent_pages": (0, 2**20),
    "worker_spin_us": (0, 10**6),
    "worker_threads_per_group": (0, 16),
    "worker_ready_timeout_s": (0.1, 3600),
    "worker_heartbeat_timeout_s": (0.4, 3600),
    "worker_wait_timeout_s": (0.01, 3600),
}


def load_json(text: str, flag: str = FLAGS["config"]) -> dict[str, Any]:
    """The object in ``text``, or in the file of ``@FILE``.

    Raises:
        ConfigError: neither; names ``flag`` and the value.
    """
    source = text
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{flag} {text!r}: cannot read the file: {error}; name one that holds a JSON object"
            ) from None
    example = "write for example '{\"recall_interval\": 8}' or @FILE"

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, inner in pairs:
            if key in found:
                raise ConfigError(
                    f"{flag}: {key!r} is there twice, as {found[key]!r} and as {inner!r}; drop one"
                )
            found[key] = inner
        return found

    try:
        value = json.loads(source, object_pairs_hook=unique)
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{flag} {text!r}: not valid JSON ({error.msg} at line {error.lineno}, column "
            f"{error.colno}); {example}"
        ) from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of too many digits
        raise ConfigError(f"{flag} {text[:60]!r}: cannot be read ({error}); {example}") from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{flag} {text!r}: expected a JSON object, got {type(value).__name__}; {example}"
        )
    return value


def _check_key(key: str, value: Any, flag: str) -> Any:
    """Check type and range of one entry of ``flag`` and return it."""
    if key not in CONFIG_KEYS:
        near = difflib.get_close_matches(str(key), CONFIG_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(CONFIG_KEYS)}"
        raise ConfigError(f"{flag}: unknown key {key!r} (value {value!r}); {hint}")
    default = getattr(OffloadConfig, key)
    if key == "exact_layers":
        return _check_layers(value, flag)
    if key in ("resident_tokens", "worker_spin_us"):
        expected: tuple[type, ...] = (int,)
    elif key == "recall_threshold":
        expected = (float,)
    elif key in _FILE_KEYS:
        expected = (str,)
    else:
        expected = (type(default),)
    if expected == (float,):
        expected = (int, float)
    is_bool_for_number = isinstance(value, bool) and expected != (bool,)
    fits = isinstance(value, expected) and not is_bool_for_number
    if not fits:
        raise ConfigError(
            f"{flag}: {key} = {value!r} is a {type(value).__name__}; "
            f"expected {' or '.join(t.__name__ for t in expected)}"
        )
    low, high = _RANGES.get(key, (value, value))
    if not low <= value <= high:
        raise ConfigError(f"{flag}: {key} = {value!r} must be between {low:g} and {high:g}")
    if key in _WRITTEN:
        check_place(f"{flag}: {key} = {value!r}", value)
    elif key in _FILE_KEYS and not Path(value).is_file():
        raise ConfigError(f"{flag}: {key} = {value!r}: there is no such file; name one that exists")
    choices = {
        "attend": ATTEND,
        "cpu_pages": CPU_PAGES,
        "digest": DIGESTS,
        "head_reduce": HEAD_REDUCTIONS,
        "predictor": PREDICTORS,
        "recall": RECALL_MODES,
        "step_engine": STEP_ENGINES,
    }.get(key)
    if choices and value not in choices:
        raise ConfigError(f"{flag}: {key} = {value!r}; choose one of {', '.join(choices)}")
    return value


def _check_layers(value: Any, flag: str) -> tuple[int, ...]:
    """A list of layer numbers, ascending; `check_layers` knows which of them the model has."""
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(type(layer) is int and layer >= 0 for layer in value):
        raise ConfigError(
            f"{flag}: exact_layers = {value!r}: expected a list of layer numbers, for "
            "example [1, 2]"
        )
    return tuple(sorted(set(value)))


def check_layers(config: OffloadConfig, num_layers: int, flag: str = FLAGS["config"]) -> None:
    """Refuse layers that the model does not have.

    Raises:
        ConfigError: naming those that it has.
    """
    if max(config.exact_layers, default=0) >= num_layers:
        raise ConfigError(
            f"{flag}: exact_layers = {list(config.exact_layers)}: the model has layers 0 to "
            f"{num_layers - 1}; name some of these, or drop the key"
        )


def check_written(config: OffloadConfig, flag: str = FLAGS["config"]) -> None:
    """Refuse files that cannot be written, by trying; what they hold stays.

    Raises:
        ConfigError: naming key, file and reason.
    """
    for key in _WRITTEN:
        path = getattr(config, key)
        if path is not None:
            check_writable(f"{flag}: {key} = {path!r}", path)


def keys_without_effect(
    digest: str = "minmax",
    precompute: bool = True,
    recall: str = "adaptive",
    has_profile: bool = False,
    policy: str = "scout",
) -> dict[str, str]:
    """Keys of ``--kv-offload-config`` that mean nothing beside these values, each with the one that
    makes it so.

    All are refused, those of recall where they differ from their defaults.
    """
    idle = {"head_reduce": "digest = 'signs'"} if digest == "signs" else {}
    if not precompute:
        idle |= dict.fromkeys(_PREDICTION_KEYS, "precompute = false")
    if policy == "infinigen":
        idle |= dict.fromkeys(_RECALL_KEYS, "--kv-offload infinigen")
        if recall != "off":  # which is what it does
            idle["recall"] = "--kv-offload infinigen"
    elif recall != "adaptive":
        cause = f"recall = {recall!r}"
        idle |= dict.fromkeys(_RECALL_KEYS, cause)
        if recall == "fixed":
            del idle["recall_interval"]
    elif has_profile:
        idle["recall_interval"] = FLAGS["recall_profile"]
    return idle


def _check_together(config: OffloadConfig, given: set[str], flags: Mapping[str, str]) -> None:
    """Values that mean something only together; ``given`` are the keys that the user wrote.

    Raises:
        ConfigError: naming both.
    """
    flag = flags["config"]
    has_profile = config.recall_profile is not None
    idle = keys_without_effect(
        config.digest, config.precompute, config.recall, has_profile, config.policy
    )
    if config.quality:
        idle.pop("predictor_file", None)  # measured beside what serves
    for key, cause in sorted(idle.items()):
        value = getattr(config, key)
        is_default = key in ("recall", *_RECALL_KEYS) and value == getattr(OffloadConfig, key)
        if key in given and not is_default:
            raise ConfigError(
                f"{flag}: {key} = {value!r} has no effect with {cause}; drop one of them"
            )
    if has_profile and (config.policy == "infinigen" or config.recall in ("off", "fixed")):
        cause = f"recall = {config.recall!r}"
        if config.policy == "infinigen":
            cause = "--kv-offload infinigen"
        raise ConfigError(
            f"{flags['recall_profile']} {config.recall_profile!r}: has no effect with {cause}; drop one "
            "of them"
        )
    if config.trace is None and config.trace_steps != OffloadConfig.trace_steps:
        raise ConfigError(
            f"{flag}: trace_steps = {config.trace_steps} needs trace, the file that they are written to"
        )
    _check_different_files(config, flag)
    if config.policy == "infinigen" and config.cpu_pages != "model":
        raise ConfigError(
            f"{flag}: cpu_pages = {config.cpu_pages!r}: --kv-offload infinigen copies its pages to the "
            "device, and copies for the worker would only take host memory; drop the key"
        )
    if config.predictor == "learned" and config.predictor_file is None:
        raise ConfigError(
            f"{flag}: predictor = 'learned' needs predictor_file; make one with "
            "benchmark/predicted_query.py"
        )
    if config.predictor_file is not None and config.predictor != "learned" and not config.quality:
        raise ConfigError(
            f"{flag}: predictor_file = {config.predictor_file!r} has no effect with predictor = "
            f"{config.predictor!r}; choose predictor = 'learned' or drop the file"
        )
    if config.resident_bonus and config.digest != "signs":
        raise ConfigError(
            f"{flag}: resident_bonus = {config.resident_bonus!r} is in units of the scores of digest = "
            f"'signs'; choose that digest or drop the bonus"
        )
    if config.quality_inputs and not config.quality:
        raise ConfigError(
            f"{flag}: quality_inputs = {config.quality_inputs} needs quality, the file beside "
            "which they are written"
        )


def _check_different_files(config: OffloadConfig, flag: str) -> None:
    taken: dict[str, str] = {}
    for key in _FILE_KEYS:
        path = getattr(config, key)
        if path is None:
            continue
        other = taken.setdefault(os.path.realpath(path), key)
        if other != key:
            raise ConfigError(f"{flag}: {key} = {path!r}: is the file of {other} too; name another")


def _check_flag_types(given: dict[str, Any], flags: Mapping[str, str]) -> None:
    """Raises ConfigError for the first value that is of another type than its flag's."""
    for name, value in given.items():
        types, expected = _FLAG_TYPES[name]
        if not isinstance(value, types) or isinstance(value, bool):
            raise ConfigError(
                f"{flags[name]} {value!r}: is a {type(value).__name__}; expected {expected}"
            )
        if value == "" and name != "config":  # that one is no JSON, which is said below
            raise ConfigError(f"{flags[name]} '': is empty; expected {expected}")


def _check_budget(budget_tokens: int, flag: str) -> None:
    page = PAGE_SIZE_TOKENS
    if not 0 < budget_tokens <= MAX_BUDGET_TOKENS or budget_tokens % page:
        nearest = (budget_tokens + page // 2) // page * page
        raise ConfigError(
            f"{flag} {budget_tokens}: must be a positive multiple of the page size "
            f"({page} tokens); the nearest is {min(max(page, nearest), MAX_BUDGET_TOKENS)}"
        )


def parse_config(
    *,
    policy: str,
    policies: tuple[str, ...],
    budget_tokens: int | None = None,
    host_gb: float | None = None,
    recall_profile: str | None = None,
    cpus: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    available_cpus: set[int] | None = None,
    flags: Mapping[str, str] = FLAGS,
) -> OffloadConfig:
    """Build the configuration from the flags' raw values.

    Args:
        policy: value of ``--kv-offload``; ``policies`` are the known ones besides ``none``.
        budget_tokens .. config: raw values of the other flags; None where not given.
            ``config`` may be the object itself.
        available_cpus: CPUs of this process; None: ask the kernel.
        flags: what to call the arguments, as ``FLAGS``.
    Raises:
        ConfigError: a value is wrong, or of a wrong type; the text names flag, value and fix.
    """
    given = {
        "policy": policy,
        "budget_tokens": budget_tokens,
        "host_gb": host_gb,
        "recall_profile": recall_profile,
        "cpus": cpus,
        "config": config,
    }
    _check_flag_types({k: x for k, x in given.items() if x is not None or k == "policy"}, flags)
    if policy != "none" and policy not in policies:
        raise ConfigError(
            f"{flags['policy']} {policy!r}: unknown policy; choose one of none, {', '.join(policies)}"
        )
    page = PAGE_SIZE_TOKENS
    budget = DEFAULT_BUDGET_TOKENS if budget_tokens is None else budget_tokens
    _check_budget(budget, flags["budget_tokens"])
    if host_gb is not None and not host_gb > 0:
        raise ConfigError(
            f"{flags['host_gb']} {host_gb}: must be greater than 0; name the GiB for KV pages, or drop it"
        )
    keys = load_json(config, flags["config"]) if isinstance(config, str) else config or {}
    values: dict[str, Any] = {
        key: _check_key(key, value, flags["config"]) for key, value in keys.items()
    }
    result = OffloadConfig(
        policy=policy,
        budget_tokens=budget,
        host_gb=host_gb,
        recall_profile=recall_profile,
        cpus=None if cpus is None else parse_cpu_list(cpus, available_cpus, flags["cpus"]),
        **values,
    )
    forced = result.sink_pages + result.recent_pages
    if forced > result.budget_pages:
        raise ConfigError(
            f"{flags['budget_tokens']} {budget}: holds {result.budget_pages} pages, fewer than "
            f"sink_pages + recent_pages = {forced}; raise it to at least {forced * page}"
        )
    if result.recall == "profile" and not recall_profile:
        raise ConfigError(
            f"{flags['config']}: recall = 'profile' needs {flags['recall_profile']} FILE"
        )
    _check_together(result, set(values), flags)
    if result.resident_tokens is not None and result.resident_tokens % page:
        raise ConfigError(
            f"{flags['config']}: resident_tokens = {result.resident_tokens} must be a "
            f"multiple of the page size ({page} tokens)"
        )
    return result
