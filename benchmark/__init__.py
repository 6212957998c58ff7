"""Benchmarks by topic: accuracy, kernels, decode steps, servers, the ring.

Run from the root of the repository: ``python -m benchmark.kernels.cpu_attention``. Server launchers are shared
with the tests (``test/servers``), small models come from ``scripts``.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(_ROOT / "test"), str(_ROOT / "scripts")]
