"""The configuration object: parsed and validated once, then passed down, never read from the environment.

Its fields are the table of all keys: type, default, range, help, public or for tests. ``parse_config.py`` checks
values by it, and docs/reference/configuration.md shows it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sglang_scout.core.page_bytes import DIGESTS

PAGE_SIZE_TOKENS = 32
"""Page size that ``--kv-offload`` implies (the paper's block size)."""

DEFAULT_DIGEST = "rotated-2"
DEFAULT_BUDGET_TOKENS = 1024
"""Half of the paper's (section 4.3), at a smaller loss with the default digest (docs/results/real_model.md)."""

DEFAULT_HOST_SHARE = 0.5
"""Share of the available memory that KV pages take when --kv-offload-host-gb is not given."""

DEFAULT_RECALL_THRESHOLD = 0.12
"""The paper's β: the CPU compute ratio that no layer should exceed (section 3.4)."""

RECALL_MODES = ("off", "fixed", "profile", "adaptive")


@dataclass(frozen=True)
class Key:
    """A key of ``--kv-offload-config``: metadata of a field of :class:`OffloadConfig`.

    Attributes:
        help: when to change it, as in docs/reference/configuration.md.
        limits: minimum and maximum.
        choices: of a string.
        multiple_of: of a number.
        is_written: it names a file that the server writes.
        needs: another key and its value without which this one has no effect.
        is_general: False: only for policies that have it among their defaults.
        is_public: False: for tests and measurements, not in user documents.
        kind, default: of the field.
    """

    help: str
    limits: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()
    multiple_of: int = 1
    is_written: bool = False
    needs: tuple[str, Any] | None = None
    is_general: bool = True
    is_public: bool = True
    kind: str = ""
    default: Any = None


def _key(default: Any, help: str, *args: Any, **rules: Any) -> Any:
    return field(default=default, metadata={"key": Key(help, *args, **rules)})


_for_tests = partial(_key, is_public=False)


@dataclass(frozen=True)
class OffloadConfig:
    """The validated configuration: the server flags, then the keys of ``--kv-offload-config``."""

    policy: str = "none"
    budget_tokens: int = DEFAULT_BUDGET_TOKENS
    host_gb: float | None = None
    recall_profile: str | None = None
    cpus: tuple[int, ...] | None = None
    page_size_tokens: int = PAGE_SIZE_TOKENS

    resident_tokens: int | None = _key(
        None,
        "Capacity for resident pages over all requests. None: budget × `--max-running-requests` on the CPU, and what "
        "the memory leaves on a CUDA device. Less saves memory and moves work to the CPU",
        (PAGE_SIZE_TOKENS, 2**40),
        multiple_of=PAGE_SIZE_TOKENS,
    )
    digest: str = _key(
        DEFAULT_DIGEST,
        "Per-page digest used for selection. Give it to both servers",
        choices=DIGESTS,
    )
    mass: float = _key(
        1.0,
        "Below 1, for a request longer than the budget a layer selects no more pages than hold this share of the "
        "attention mass, as the digest estimates it; weighted by value norms where the digest has them",
        (0.01, 1.0),
        needs=("head_reduce", "mass"),
    )
    attend: str = _key(
        "selected",
        "What the device attends to: selected pages only, or all resident ones, which reads more",
        choices=("resident", "selected"),
    )
    exact_layers: tuple[int, ...] = _key(
        (),
        "Layers that select with the real query and wait for CPU attention: those whose predicted queries are poor",
        needs=("precompute", True),
    )
    recall: str = _key("adaptive", "When a layer recalls its missing pages", choices=RECALL_MODES)
    recall_interval: int = _key(
        8,  # the paper's profiled mean is 8.7
        "Steps between two recalls of a layer: always with `fixed`, initially with `adaptive`",
        (1, 2**31),
    )
    recall_threshold: float | None = _key(
        None,
        "β, the CPU compute ratio that `adaptive` keeps each layer below. None: the profile's, or 0.12 without one",
        (0.0, 1.0),
    )
    recall_step_mib: float = _key(
        256.0,  # half of the paper's 20 ms at 25 GB/s
        "Most that `adaptive` copies per step, best half of a step's time times the link's bandwidth",
        (0.001, 2**30),
    )
    prefill_digests: bool = _key(
        True, "False on the prefill server: the decode server computes the digests"
    )
    trace: str | None = _key(None, "File for a timeline in Chrome's trace format", is_written=True)
    step_log: str | None = _key(
        None,
        "File for one JSON line per decode step: pages left to the CPU by layer and request, waits, recalls, how well "
        "queries were predicted; it grows",
        is_written=True,
    )

    paper: bool = _key(
        False,
        "The paper's choices: digests of minimum and maximum, the CPU's part weighted by the predicted query, recall "
        "at intervals. Give it to both servers; the paper's budget is 2048",
        is_general=False,
    )
    page_checksums: bool = _key(
        False,
        "On the decode server: a request whose KV has changed in host memory ends with an error, see "
        "[below](#wrong-kv-in-host-memory)",
        is_general=False,
    )
    hgca_beta: float = _key(
        1.0,
        "A token is kept if its attention weight exceeds this multiple of the mean weight; lower values keep more",
        (0.0, math.inf),
        is_general=False,
    )
    hgca_alpha: float = _key(
        0.1, "Share of the newest step in the moving average", (0.0, 1.0), is_general=False
    )
    context_cap_tokens: int | None = _key(
        None,
        "Maximum kept tokens per request, layer and head. None: as many as fit",
        (1, 2**31),
        is_general=False,
    )
    forecast_file: str | None = _key(
        None,
        "Weights that select pages one layer ahead: `scripts/train_forecast.py --kind forecast`",
        is_general=False,
    )
    pilot_file: str | None = _key(
        None,
        "Weights of page embeddings, given to both servers: `scripts/train_forecast.py --kind pilot`",
        is_general=False,
    )
    digest_file: str | None = _key(
        None,
        "Coordinates of `calibrated` digests, which it implies; given to both servers: `scripts/train_forecast.py "
        "--kind digest`",
        is_general=False,
        needs=("digest", "calibrated"),
    )

    context_share: float = _for_tests(
        0.0, "Memory for kept tokens, as a share of the host pages'", (0.0, 1.0)
    )
    grain: str = _for_tests(
        "layer", "Who selects pages: all heads of a layer, or each", choices=("layer", "head")
    )
    sink_pages: int = _for_tests(1, "First pages that are always selected", (0, 2**20))
    recent_pages: int = _for_tests(1, "Newest full pages that are always selected", (0, 2**20))
    head_reduce: str = _for_tests("mass", "Reduction of heads' scores", choices=("mass", "max"))
    reweigh: bool = _for_tests(
        True, "Re-weight the CPU's part by the digests' estimate for the real query"
    )
    precompute: bool = _for_tests(True, "False: missing pages wait for the real query")
    transport: str = _for_tests(
        "auto", "Who posts missing pages: the host, or kernels", choices=("auto", "host", "graph")
    )
    verify: bool = _for_tests(False, "Compare every layer with fp32 attention over host pages")
    dummy_kv: bool = _for_tests(False, "With the fake transfer backend: pages of seeded noise")
    trace_steps: int = _for_tests(64, "Steps that the trace keeps", (1, 10**6))
    worker_spin_us: int | None = _for_tests(None, "Polling before a thread sleeps", (0, 10**6))
    attend_kernel: str = _for_tests(
        "auto", "Attention on the device", choices=("auto", "native", "triton", "flash")
    )
    worker_threads_per_group: int = _for_tests(0, "Per sequence; 0: as is fastest", (0, 16))
    worker_ready_timeout_s: float = _for_tests(60.0, "To start the process", (0.1, 3600))
    # A heartbeat is sent every 0.2 s.
    worker_heartbeat_timeout_s: float = _for_tests(0.8, "Silence before it is killed", (0.4, 3600))
    worker_wait_timeout_s: float = _for_tests(10.0, "For an answer", (0.01, 3600))

    @property
    def budget_pages(self) -> int:
        """Pages selected per list, step and layer: the k of top-k."""
        return self.budget_tokens // self.page_size_tokens

    def lists(self, num_kv_heads: int) -> int:
        """Selection lists of a request in a layer."""
        return num_kv_heads if self.grain == "head" else 1

    def of_rank(self, rank: int) -> OffloadConfig:
        """The same for a tensor-parallel rank: from rank 1 on it writes to separate files, with ``.rankN`` before their
        suffix."""
        if rank == 0:
            return self
        paths = {
            key: Path(value) for key in WRITTEN_KEYS if (value := getattr(self, key)) is not None
        }
        own = {key: str(p.with_name(f"{p.stem}.rank{rank}{p.suffix}")) for key, p in paths.items()}
        return dataclasses.replace(self, **own)  # type: ignore[arg-type]


KEYS: dict[str, Key] = {
    f.name: dataclasses.replace(
        f.metadata["key"], kind=str(f.type).removesuffix(" | None"), default=f.default
    )
    for f in dataclasses.fields(OffloadConfig)
    if "key" in f.metadata
}
PUBLIC_KEYS = tuple(name for name, key in KEYS.items() if key.is_public and key.is_general)
WRITTEN_KEYS = tuple(name for name, key in KEYS.items() if key.is_written)
FLAGS = {
    "policy": "--kv-offload",
    "budget_tokens": "--kv-offload-budget",
    "host_gb": "--kv-offload-host-gb",
    "recall_profile": "--kv-offload-recall-profile",
    "cpus": "--kv-offload-cpus",
    "config": "--kv-offload-config",
}
"""Names of the arguments of `parse_config` in error messages; a command with its own flags passes its own."""
