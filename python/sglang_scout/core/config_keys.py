"""The entries of ``--kv-offload-config``: read, and each checked by itself."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

from sglang_scout.core.config import (
    ATTEND,
    CONFIG_KEYS,
    FLAGS,
    HEAD_REDUCTIONS,
    PAGE_SIZE_TOKENS,
    RECALL_MODES,
    TRANSPORTS,
    WRITTEN_KEYS,
    OffloadConfig,
)
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.files import check_writable
from sglang_scout.core.page_bytes import DIGESTS

# Smallest and largest value of the numeric keys. A heartbeat is sent every 0.2 s.
_RANGES: dict[str, tuple[float, float]] = {
    "resident_tokens": (PAGE_SIZE_TOKENS, 2**40),
    "recall_interval": (1, 2**31),
    "recall_threshold": (0.0, 1.0),
    "recall_step_mib": (0.001, 2**30),
    "recall_link_share": (0.01, 1.0),
    "heat_half_life_steps": (0.5, 10**6),
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

_OWN_FLAGS = {
    name: flag
    for key, flag in FLAGS.items()
    if key not in ("policy", "config")
    for name in (key, flag.removeprefix("--kv-offload-").replace("-", "_"))
}
"""What may be taken for a key, each with the flag that it is."""


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


def _is_file_name(text: str) -> bool:
    try:
        return bool(text) and "\0" not in text and bool(os.fsencode(text))
    except UnicodeEncodeError:
        return False


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def check_key(key: str, value: Any, flag: str) -> Any:
    """Check type and range of one entry of ``flag`` and return it."""
    if key not in CONFIG_KEYS:
        name = str(key).lstrip("-").replace("-", "_").removeprefix("kv_offload_")
        near = difflib.get_close_matches(str(key), CONFIG_KEYS, n=1, cutoff=0.75)
        if name in _OWN_FLAGS:
            hint = f"that is a flag of its own, {_OWN_FLAGS[name]}"
        elif near:
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = f"known keys: {', '.join(CONFIG_KEYS)}"
        raise ConfigError(f"{flag}: unknown key {key!r} (value {value!r}); {hint}")
    default = getattr(OffloadConfig, key)
    if key == "exact_layers":
        return _check_layers(value, flag)
    if key in ("resident_tokens", "worker_spin_us"):
        expected: tuple[type, ...] = (int,)
    elif key == "recall_threshold":
        expected = (float,)
    elif key in WRITTEN_KEYS:
        expected = (str,)
    else:
        expected = (type(default),)
    if expected == (float,):
        expected = (int, float)
    is_bool_for_number = isinstance(value, bool) and expected != (bool,)
    fits = isinstance(value, expected) and not is_bool_for_number
    if not fits:
        raise ConfigError(
            f"{flag}: {key} = {value!r} is of type {type(value).__name__}; "
            f"expected {' or '.join(t.__name__ for t in expected)}"
        )
    low, high = _RANGES.get(key, (value, value))
    if not low <= value <= high:
        raise ConfigError(
            f"{flag}: {key} = {value!r} must be between {_number(low)} and {_number(high)}"
        )
    if key in WRITTEN_KEYS and not _is_file_name(value):
        raise ConfigError(
            f"{flag}: {key} = {value!r}: cannot be a file; name a file, or drop the key"
        )
    choices = {
        "attend": ATTEND,
        "digest": DIGESTS,
        "head_reduce": HEAD_REDUCTIONS,
        "recall": RECALL_MODES,
        "transport": TRANSPORTS,
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


def check_files(config: OffloadConfig, flag: str = FLAGS["config"]) -> None:
    """Refuse files that cannot be written, by trying. What they hold stays.

    For the process that uses them: another machine may have none of their folders.

    Raises:
        ConfigError: naming key, file and reason.
    """
    for key in WRITTEN_KEYS:
        path = getattr(config, key)
        if path is not None:
            check_writable(f"{flag}: {key} = {path!r}", path)
