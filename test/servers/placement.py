"""Which device the servers of a pair run on, and their shares of its memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sglang_scout.cli import checks, doctor
from sglang_scout.core.errors import ConfigError

AUTO, CPU, CUDA = CHOICES = ("auto", "cpu", "cuda")

# Shares of the device memory free at a server's start, as in --mem-fraction-static. On one GPU the prefill server takes
# the first, and the decode server, started later, the second of the rest.
PREFILL_SHARE, DECODE_SHARE = 0.4, 0.7
WHOLE_SHARE = 0.8
CPU_SHARE = 0.5
"""SGLang's default becomes negative on a CPU with the prefill size of the demo."""


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

    def memory(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Flags about device and memory of the prefill and of the decode server."""
        shares = [CPU_SHARE if on == CPU else WHOLE_SHARE for on in (self.prefill, self.decode)]
        if self.one_gpu_for_both:
            shares = [PREFILL_SHARE, DECODE_SHARE]
        prefill, decode = (
            {"device": on, "mem_fraction_static": share}
            for on, share in zip((self.prefill, self.decode), shares, strict=True)
        )
        if self.prefill == self.decode == CUDA and not self.one_gpu_for_both:
            decode["base_gpu_id"] = self.gpus // 2  # half for each, also with --tp-size
        return prefill, decode

    def __str__(self) -> str:
        if self.prefill == self.decode:
            return f"both on {self.decode}" + ", one GPU for both" * self.one_gpu_for_both
        return (
            f"decode on {self.decode}, prefill on {self.prefill}: the installed mooncake cannot read "
            "device memory (docs/gpu-quickstart.md)"
        )


def place(wanted: str) -> Placement:
    """``wanted``: one of CHOICES; "auto" is cuda where a CUDA device can be used, unless the environment asks for the
    CPU. Raises ConfigError for "cuda" if torch sees no device.
    """
    forced = "1" in (os.getenv("SCOUT_FORCE_CPU"), os.getenv("SGLANG_USE_CPU_ENGINE"))
    if wanted == CPU or (wanted == AUTO and (forced or not os.path.exists("/dev/nvidiactl"))):
        return Placement(CPU, CPU, 0)
    check = checks.check_gpu()
    gpus = check.values.get("cuda_devices")
    if not gpus and wanted == CUDA:
        raise ConfigError(f"--device cuda: GPU: {check.found}; give --device cpu")
    if not gpus:
        return Placement(CPU, CPU, 0)
    return Placement(CUDA if doctor.transfer_reads_device() else CPU, CUDA, gpus)
