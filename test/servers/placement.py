"""Which device the servers of a pair run on, and their shares of its memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_scout.cli import machine_checks as machine
from sglang_scout.core.errors import ConfigError

AUTO, CPU, CUDA = CHOICES = ("auto", "cpu", "cuda")
DRIVER_NODES = (Path("/dev/nvidiactl"),)

# Shares of the device memory free at a server's start, as in --mem-fraction-static. On one GPU the prefill server takes
# the first, and the decode server, started later, the second of the rest.
PREFILL_SHARE, DECODE_SHARE = 0.4, 0.7
WHOLE_SHARE = 0.8


@dataclass(frozen=True)
class Placement:
    """Devices of the two servers.

    Attributes:
        prefill, decode: "cpu" or "cuda". The prefill server stays on the CPU if the KV transfer cannot read device
            memory.
        gpus: usable CUDA devices; 0 on the CPU.
    """

    prefill: str
    decode: str
    gpus: int

    @property
    def one_gpu_for_both(self) -> bool:
        return self.prefill == self.decode == CUDA and self.gpus == 1

    @property
    def ready_timeout_s(self) -> float:
        """For the servers' start; on a GPU kernels may have to be compiled first."""
        return 600.0 if self.decode == CPU else 1200.0

    @property
    def prefill_config(self) -> dict[str, Any]:
        """Keys of --kv-offload-config for the prefill server, besides the decode server's."""
        # Digests are on the decode server's device, which this transfer cannot write.
        return {} if self.prefill == self.decode else {"prefill_digests": False}

    def memory(self, cpu_share: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Flags about memory and GPU of the prefill and of the decode server.

        Args:
            cpu_share: --mem-fraction-static of a server on the CPU.
        """
        shares = [cpu_share if on == CPU else WHOLE_SHARE for on in (self.prefill, self.decode)]
        if self.one_gpu_for_both:
            shares = [PREFILL_SHARE, DECODE_SHARE]
        prefill, decode = ({"mem_fraction_static": share} for share in shares)
        if self.prefill == self.decode == CUDA and not self.one_gpu_for_both:
            decode["base_gpu_id"] = self.gpus // 2  # half for each, also with --tp-size
        return prefill, decode

    def __str__(self) -> str:
        if self.prefill == self.decode:
            text = f"both on {self.decode}"
            return text + (", one GPU for both" if self.one_gpu_for_both else "")
        return (
            f"decode on {self.decode}, prefill on {self.prefill}: the installed mooncake cannot read "
            "device memory (docs/gpu-quickstart.md)"
        )


def place(wanted: str) -> Placement:
    """The servers' devices.

    Args:
        wanted: "cpu", "cuda", or "auto": cuda where a CUDA device can be used, unless the environment asks
            for the CPU (SCOUT_FORCE_CPU=1, SGLANG_USE_CPU_ENGINE=1).
    Raises:
        ConfigError: "cuda", and torch sees no device.
    """
    forced = wants_cpu(os.environ)
    if wanted == CPU or (wanted == AUTO and (forced or not any(p.exists() for p in DRIVER_NODES))):
        return Placement(CPU, CPU, 0)
    gpus, why = machine.cuda_devices()
    if not gpus:
        if wanted == AUTO:
            return Placement(CPU, CPU, 0)
        raise ConfigError(f"--device cuda: torch sees no CUDA device ({why}); give --device cpu")
    return Placement(CUDA if machine.transfer_reads_device() else CPU, CUDA, gpus)


def wants_cpu(environment: Mapping[str, str]) -> bool:
    """Whether an environment requests the CPU."""
    return "1" in (environment.get("SCOUT_FORCE_CPU"), environment.get("SGLANG_USE_CPU_ENGINE"))
