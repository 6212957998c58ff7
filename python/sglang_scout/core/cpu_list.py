"""Linux CPU lists, as ``--kv-offload-cpus`` takes them."""

from __future__ import annotations

import os

from sglang_scout.core.errors import ConfigError


def parse_cpu_list(text: str, available: set[int] | None = None) -> tuple[int, ...]:
    """Parse a Linux CPU list such as ``0-3,8`` into sorted CPU numbers.

    Args:
        text: the list.
        available: CPUs that this process may run on; None: ask the kernel.
    Raises:
        ConfigError: not a list, or a CPU that does not exist here.
    """
    flag = "--kv-offload-cpus"
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            raise ConfigError(
                f"{flag} {text!r}: {part.strip()!r} is not a CPU number or a range; "
                "write for example 0-3,8"
            ) from None
        if low < 0 or high < low:
            raise ConfigError(f"{flag} {text!r}: {part.strip()!r} is not an ascending range")
        if high - low > 65535:
            raise ConfigError(f"{flag} {text!r}: {part.strip()!r} names more CPUs than exist")
        cpus.update(range(low, high + 1))
    if available is None:
        available = os.sched_getaffinity(0)
    absent = sorted(cpus - available)
    if absent:
        raise ConfigError(
            f"{flag} {text!r}: this process may not run on CPU {absent[0]}; "
            f"available are {_format_cpus(available)}"
        )
    return tuple(sorted(cpus))


def _format_cpus(cpus: set[int]) -> str:
    ordered = sorted(cpus)
    if ordered and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))
