"""The one configuration object: parsed and validated once, then passed down, never read from the environment.

``parse_config.py`` makes it; what it refuses ends in a :class:`ConfigError` (a ``ValueError``) that names the flag,
the value and the fix.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

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
HEAD_REDUCTIONS = ("mass", "max")
PREDICTORS = ("next_layer", "extrapolate", "learned")
RECALL_MODES = ("off", "fixed", "profile", "adaptive")
STEP_ENGINES = ("auto", "host", "device")


WRITTEN_KEYS = ("trace", "step_log", "quality")
"""Keys that name a file to write."""


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
    """Threads that share one sequence; 0: as is fastest, see ``core/split.py``."""
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
        paths = {
            key: Path(value) for key in WRITTEN_KEYS if (value := getattr(self, key)) is not None
        }
        own = {key: str(p.with_name(f"{p.stem}.rank{rank}{p.suffix}")) for key, p in paths.items()}
        return dataclasses.replace(self, **own)  # type: ignore[arg-type]


_FLAG_FIELDS = {"policy", "budget_tokens", "host_gb", "recall_profile", "cpus", "page_size_tokens"}
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
