"""Properties of this machine: /sys and /proc, CUDA devices, the installed mooncake. Torch is not imported here."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sglang_scout.worker import numa

ASK_TIMEOUT_S = 120.0
COUNT_DEVICES = (
    "import torch, sys; torch.version.cuda or sys.exit('torch is built without CUDA'); "
    "print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
)
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class 03: display controllers, 0302 for those without a screen


@dataclass(frozen=True)
class Gpu:
    """A PCI device. ``numa_node`` is -1 if there is one node or it is unknown."""

    address: str
    numa_node: int


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nvidia_gpus() -> list[Gpu]:
    """NVIDIA display controllers on the PCI bus, by address."""
    found = []
    for device in sorted((numa.SYS / "bus/pci/devices").glob("*")):
        if _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY):
            found.append(Gpu(device.name, int(_read(device / "numa_node") or -1)))
    return found


def cpu_quota() -> float | None:
    """CPU quota of the control group; None without a limit."""
    quota, _, period = _read(numa.SYS / "fs/cgroup/cpu.max").partition(" ")
    if not period:
        quota = _read(numa.SYS / "fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _read(numa.SYS / "fs/cgroup/cpu/cpu.cfs_period_us")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        cpus = int(quota) / int(period)
        return cpus if cpus > 0 else None
    return None


def has_rdma() -> bool:
    with contextlib.suppress(OSError):
        return any((numa.SYS / "class/infiniband").iterdir())
    return False


def cuda_devices() -> tuple[int, str]:
    """How many CUDA devices torch can use, and why none. Takes seconds, to import torch."""
    command = [sys.executable, "-c", COUNT_DEVICES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
        count = int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError) as error:
        return 0, str(error)
    except (IndexError, ValueError):
        return 0, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count or hidden not in ("", "-1"):
        return count, "" if count else "no driver or no device"
    return 0, f"CUDA_VISIBLE_DEVICES={hidden!r}"


def transfer_reads_device() -> bool:
    """Whether the installed mooncake was built with CUDA.

    Without it mooncake passes the address of device memory to the socket, which refuses it, and every transfer fails;
    also of digests that arrive in device memory. With it, device memory is copied through the host.
    """
    spec = importlib.util.find_spec("mooncake")  # a lookup without an import
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for module in Path(folder).glob("engine*.so"):
            if b"cudaMemcpy" in module.read_bytes():
                return True
    return False
