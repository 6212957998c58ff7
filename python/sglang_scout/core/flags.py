"""Checks what a user gives: the server flags, the keys of ``--kv-offload-config``, the files that they name, SGLang's
release and the model. It is refused at the start, before minutes of work."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sglang_scout.core.config import (
    DEFAULT_BUDGET_TOKENS,
    FLAGS,
    KEYS,
    PAGE_SIZE_TOKENS,
    PUBLIC_KEYS,
    WRITTEN_KEYS,
    OffloadConfig,
)
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.numa import parse_cpu_list

MAX_BUDGET_TOKENS = 2**40
SOCKET_PATH_BYTES = 107  # limit of Linux
ADAPTERS = {"0.5.23": "sglang_0_5_23", "0.5.15.post1": "sglang_0_5_15"}
"""Adapter module of ``plugin/`` by SGLang version, the default first."""
UNTESTED_OVERRIDE = "SCOUT_UNTESTED_SGLANG"
ARCHITECTURES = tuple(
    f"{family}ForCausalLM"
    for family in ("Qwen2", "Qwen3", "Llama", "Mistral", "Glm4", "Qwen3Moe", "Mixtral")
)
WINDOWED = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "Cohere2ForCausalLM")
HEAD_SIZES = (64, 96, 128, 256)
DTYPES = ("float32", "bfloat16", "float16")
FP8_KV = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Storage dtype of K and V by the value of --kv-cache-dtype, unless it is auto."""

Text = Annotated[str, Meta(min_length=1)]
# What a flag's value is checked against, and what it should be. Values from Python may be anything.
_FLAG_KINDS: dict[str, tuple[Any, str]] = {
    "policy": (Text, "the name of a policy, for example 'scout'"),
    "budget_tokens": (int | None, f"a whole number of tokens, for example {DEFAULT_BUDGET_TOKENS}"),
    "host_gb": (Annotated[float, Meta(gt=0)] | None, "the GiB for KV pages, for example 64.0"),
    "recall_profile": (Text | None, "the name of a file, or leave it out"),
    "cpus": (Text | None, "a list as text, for example '0-3,8'"),
    "config": (str | dict | None, "a JSON object as text or as a dict, or '@FILE'"),
}


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
        policies: the known ones besides ``none``, each with its overrides of keys' defaults, or with the overrides that
            a key makes if true.
        available_cpus: CPUs of this process; None: ask the kernel.
    Raises:
        ConfigError: a value is wrong, or of a wrong type; the message names flag, value and fix.
    """
    values = policy, budget_tokens, host_gb, recall_profile, cpus, config
    for (name, (kind, expected)), value in zip(_FLAG_KINDS.items(), values, strict=True):
        try:
            msgspec.convert(value, kind)
        except (msgspec.ValidationError, UnicodeError) as error:
            raise ConfigError(f"{FLAGS[name]} {value!r}: {error}; give {expected}") from None
    if policy != "none" and policy not in policies:
        raise ConfigError(
            f"{FLAGS['policy']} {policy!r}: unknown policy; choose one of none, {', '.join(policies)}"
        )
    own = policies.get(policy, {})
    raw = load_json(config) if isinstance(config, str) else config or {}
    keys = {name: _check_value(name, value) for name, value in raw.items()}
    for name in keys:
        if not KEYS[name].is_general and name not in own:
            owners = [other for other, known in policies.items() if name in known]
            raise ConfigError(
                f"{FLAGS['config']}: {name} = {keys[name]!r} has no effect with {FLAGS['policy']} {policy}; it is for "
                f"{' and '.join(owners)}; drop it"
            )
    defaults = {"budget_tokens": DEFAULT_BUDGET_TOKENS}
    for name, value in own.items():
        if not isinstance(value, Mapping):
            defaults[name] = value
        elif keys.get(name):
            defaults |= value
    if budget_tokens is not None:
        defaults["budget_tokens"] = budget_tokens
    _check_budget(defaults["budget_tokens"])
    result = OffloadConfig(
        policy=policy,
        host_gb=host_gb,
        recall_profile=recall_profile,
        cpus=None if cpus is None else parse_cpu_list(cpus, available_cpus, FLAGS["cpus"]),
        **{**defaults, **keys},
    )
    _check_together(result, keys)
    return result


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
    flag = FLAGS["config"]
    if name not in KEYS:
        near = difflib.get_close_matches(str(name), KEYS, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(PUBLIC_KEYS)}"
        raise ConfigError(f"{flag}: unknown key {name!r} (value {value!r}); {hint}")
    key, what = KEYS[name], f"{flag}: {name} = {value!r}"
    try:
        checked = msgspec.convert(value, key.kind)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ConfigError(f"{what}: {error}; it takes {key.values}") from None
    if key.is_written and not (value and value.isprintable()):
        raise ConfigError(f"{what}: not a file name; name a file, or drop the key")
    return checked


def check_layers(config: OffloadConfig, num_layers: int) -> None:
    if max(config.exact_layers, default=0) >= num_layers:
        raise ConfigError(
            f"{FLAGS['config']}: exact_layers = {list(config.exact_layers)}: the model has layers 0 to "
            f"{num_layers - 1}; name some of these, or drop the key"
        )


def _written_files(config: OffloadConfig) -> dict[str, str]:
    paths = {key: path for key in WRITTEN_KEYS if (path := getattr(config, key)) is not None}
    return {f"{FLAGS['config']}: {key} = {path!r}": path for key, path in paths.items()}


def check_files(config: OffloadConfig) -> None:
    """Refuse a decode server without a file that it needs, and files that cannot be written, by opening them, in the
    process that uses them. Their contents are kept; the target of a dangling link is created."""
    if config.paper and config.recall == "fixed" and config.recall_profile is None:
        raise ConfigError(
            f"{FLAGS['config']}: paper = True: needs {FLAGS['recall_profile']} FILE; to make one, serve requests "
            'longer than the budget with \'{"paper": true, "recall": "off", "step_log": "steps.jsonl"}\', then run '
            "`sglang-scout profile steps.jsonl --output FILE`"
        )
    for what, path in _written_files(config).items():
        # os.path, unlike pathlib, also returns False for paths that cannot be accessed.
        folder = os.path.dirname(path) or "."
        if os.path.isdir(path) or not os.path.isdir(folder):
            raise ConfigError(f"{what}: is a folder, or in one that does not exist; name a file")
        if os.path.exists(path) and not os.path.isfile(path):
            continue  # a pipe, whose reader would see the open, or a device
        is_new = not os.path.lexists(path)
        try:
            with open(path, "ab"):
                pass
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{what}: cannot be written: {why}; name another file") from None
        if is_new:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _check_budget(budget_tokens: int) -> None:
    page = PAGE_SIZE_TOKENS
    if not 0 < budget_tokens <= MAX_BUDGET_TOKENS or budget_tokens % page:
        nearest = (budget_tokens + page // 2) // page * page
        least = (OffloadConfig.sink_pages + OffloadConfig.recent_pages) * page
        raise ConfigError(
            f"{FLAGS['budget_tokens']} {budget_tokens}: must be a positive multiple of the page size "
            f"({page} tokens); set it to {min(max(least, nearest), MAX_BUDGET_TOKENS)}"
        )


def _check_together(config: OffloadConfig, keys: Mapping[str, Any]) -> None:
    forced = config.sink_pages + config.recent_pages
    if forced > config.budget_pages:
        plural = "" if config.budget_pages == 1 else "s"
        raise ConfigError(
            f"{FLAGS['budget_tokens']} {config.budget_tokens}: holds {config.budget_pages} page{plural}, fewer "
            f"than sink_pages + recent_pages = {forced}; raise it to at least {forced * PAGE_SIZE_TOKENS}"
        )
    if config.exact_layers and not config.precompute:  # each layer has its real query
        cause = (
            "precompute = false" if "precompute" in keys else f"{FLAGS['policy']} {config.policy}"
        )
        what = f"{FLAGS['config']}: exact_layers = {config.exact_layers}"
        raise ConfigError(f"{what} has no effect with {cause}; drop one of them")
    profile = config.recall_profile
    read = {} if profile is None else {f"{FLAGS['recall_profile']} {profile!r}": profile}
    check_different(read | _written_files(config))


def check_socket_folder() -> None:
    """Refuse a folder for temporary files whose path is too long for the sockets that SGLang creates in it."""
    folder = tempfile.gettempdir()
    size, limit = len(os.fsencode(folder)), SOCKET_PATH_BYTES - len("/tmpabcdefgh")
    if size > limit:
        raise ConfigError(
            f"TMPDIR={folder}: its {size} bytes are too many for SGLang's sockets in it, whose paths may have "
            f"{SOCKET_PATH_BYTES} bytes; set TMPDIR to a folder whose path has at most {limit} bytes"
        )


def check_different(files: Mapping[str, str]) -> None:
    """Refuse one file under two names: one would overwrite the other. ``files``: paths by flag or key and value."""
    taken: dict[str | tuple[int, int], str] = {}
    for what, path in files.items():
        try:
            found = os.stat(path)
            file: str | tuple[int, int] = found.st_dev, found.st_ino  # also equal for hard links
        except (OSError, ValueError):
            file = os.path.realpath(path)
        if (other := taken.setdefault(file, what)) != what:
            other = other.rpartition(": ")[2]
            raise ConfigError(f"{what}: {other} names the same file; name another")


def check_version(found: str) -> str:
    """The supported release as which the installed one is treated. Refuses a release whose hooks have not been checked;
    with ``SCOUT_UNTESTED_SGLANG=1`` it is tried as the default."""
    default = next(iter(ADAPTERS))
    if found in ADAPTERS or os.environ.get(UNTESTED_OVERRIDE) == "1":
        return found if found in ADAPTERS else default
    raise ConfigError(
        f"sglang {found} is installed, but this sglang-scout supports only {' and '.join(ADAPTERS)}; "
        f"install sglang=={default}, or set {UNTESTED_OVERRIDE}=1 to try it untested"
    )


def check_architecture(what: str, architecture: str) -> None:
    """Refuse a model that the decode step does not support; ``what`` is the flag that names it, and its value."""
    if architecture not in ARCHITECTURES:
        is_windowed = architecture in WINDOWED
        why = ", some of whose layers use sliding-window attention" if is_windowed else ""
        raise ConfigError(
            f"{what}: --kv-offload does not support {architecture}{why}; serve it without --kv-offload, or choose one "
            f"of {', '.join(ARCHITECTURES)}"
        )


def check_attention(what: str, *, head_dim: int, v_head_dim: int, has_window: bool) -> None:
    """Refuse attention that the decode step does not support: sizes of a key and of a value, a sliding window."""
    if has_window:
        raise ConfigError(
            f"{what}: --kv-offload does not support sliding-window attention; serve it without "
            "--kv-offload, or choose a model with full attention"
        )
    if head_dim not in HEAD_SIZES or v_head_dim != head_dim:
        raise ConfigError(
            f"{what}: K has head size {head_dim} and V {v_head_dim}; --kv-offload supports "
            f"{', '.join(map(str, HEAD_SIZES))}, the same for both"
        )
