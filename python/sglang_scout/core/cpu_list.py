"""Linux CPU lists, as ``--kv-offload-cpus`` takes them."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable

from sglang_scout.core.errors import ConfigError

# Stricter than int(), which also accepts 1_0, +0 and digits of other scripts.
_RANGE = re.compile(r"([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?")


def parse_cpu_list(
    text: str, available: set[int] | None = None, flag: str = "--kv-offload-cpus"
) -> tuple[int, ...]:
    """Parse a Linux CPU list such as ``0-3,8`` into sorted CPU numbers.

    Args:
        available: CPUs that this process may run on; None: ask the kernel.
        flag: the source of ``text``, for the message.
    Raises:
        ConfigError: not a list, or a CPU that does not exist here.
    """
    cpus: set[int] = set()
    for part in map(str.strip, text.split(",")):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ConfigError(
                f"{flag} {text!r}: {part!r} is not a CPU number or a range; write for example 0-3,8"
            )
        low, high = int(found[1]), int(found[2] or found[1])
        if high < low:
            raise ConfigError(
                f"{flag} {text!r}: {part!r} is not an ascending range; write {high}-{low}"
            )
        cpus.update(range(low, high + 1))
    if available is None:
        available = os.sched_getaffinity(0)
    absent = sorted(cpus - available)
    if absent:
        raise ConfigError(
            f"{flag} {text!r}: this process may not run on CPU {absent[0]}; "
            f"available are {ranges(available)}"
        )
    return tuple(sorted(cpus))


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as a Linux list, ascending: 0-3,8."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda at: at[1] - at[0]):
        first, *more = (str(number) for _, number in run)
        parts.append(f"{first}-{more[-1]}" if more else first)
    return ",".join(parts)
