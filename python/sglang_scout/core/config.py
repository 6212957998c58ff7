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
        help: what it does and when to change it, as in docs/reference/configuration.md; ``Default: …`` at its end says
            how a default is computed.
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
        "Size of the device's cache of resident pages, in tokens over all requests. Raise it if the CPU compute ratio "
        "stays high. Lower it to leave memory to digests, and so to more host pages; more work "
        "then stays with the CPU. Default: on the CPU device the budget times `--max-running-requests`; on a CUDA "
        "device what the digests leave",
        (PAGE_SIZE_TOKENS, 2**40),
        multiple_of=PAGE_SIZE_TOKENS,
    )
    digest: str = _key(
        DEFAULT_DIGEST,
        "Summary of each page from which pages are selected. `minmax`, the paper's, takes 0.4 of the memory of "
        "`rotated-2`, but finds the important pages less well (measured on one small model). `calibrated` takes 0.6 "
        "and needs `digest_file`. Give the same to both servers",
        choices=DIGESTS,
    )
    mass: float = _key(
        1.0,
        "Share of the attention mass that the selected pages should hold, as the digests estimate it. Below 1, a "
        "layer selects no more pages than it needs for that share, which saves CPU time and copies and costs "
        "accuracy. Has no effect on a request that fits the budget",
        (0.01, 1.0),
        needs=("head_reduce", "mass"),
    )
    attend: str = _key(
        "selected",
        "Pages that the device attends to. `selected`: only those that this step selected. `resident`: all that are "
        "resident, which reads more memory",
        choices=("resident", "selected"),
    )
    exact_layers: tuple[int, ...] = _key(
        (),
        "Layers that select pages with their real query and then wait for CPU attention. If accuracy suffers, list "
        "the layers that `sglang-scout profile` shows with a cosine below 0.8: their queries are predicted poorly",
        needs=("precompute", True),
    )
    recall: str = _key(
        "adaptive",
        "When a layer copies its missing pages to the device. `adaptive`: when its CPU compute ratio would exceed "
        "`recall_threshold`. `fixed`: every `recall_interval` steps. `profile`: at the intervals of "
        "`--kv-offload-recall-profile`. `off`: only a new request's first pages. Serve with `adaptive`; the others "
        "are for a stable workload or for comparison",
        choices=RECALL_MODES,
    )
    recall_interval: int = _key(
        8,  # the paper's profiled mean is 8.7
        "Steps between two recalls of a layer with `recall: fixed`. With `adaptive` it is only the first estimate",
        (1, 2**31),
    )
    recall_threshold: float | None = _key(
        None,
        "CPU compute ratio that no layer should exceed with `adaptive` (the paper's β). Lower it to move work from "
        "the CPU to the link, raise it if steps wait for recalls. Default: the profile's threshold, or "
        f"{DEFAULT_RECALL_THRESHOLD} without a profile",
        (0.0, 1.0),
    )
    recall_step_mib: float = _key(
        256.0,  # half of the paper's 20 ms at 25 GB/s
        "Most MiB that `adaptive` copies in one step, on each rank. Choose half of what the link copies in the time "
        "of a step; lower it if steps wait for recalls",
        (0.001, 2**30),
    )
    prefill_digests: bool = _key(
        True,
        "Whether the prefill server computes the digests and sends them with the KV. If false, the decode server "
        "computes them when the KV arrives. For the prefill server only",
    )
    trace: str | None = _key(
        None,
        "File for a timeline of the first 64 decode steps in Chrome's trace format, which ui.perfetto.dev opens",
        is_written=True,
    )
    step_log: str | None = _key(
        None,
        "File for a JSON line per decode step: missing pages by layer and request, waits, recalls, and how well "
        "queries were predicted. `sglang-scout report` and `sglang-scout profile` read it. It grows without limit",
        is_written=True,
    )

    paper: bool = _key(
        False,
        "The paper's choices: `digest: minmax`, `recall: fixed`, and results of CPU attention merged as computed "
        "with the predicted query. To compare with the paper; give it to both servers, with `--kv-offload-budget "
        "2048`",
        is_general=False,
    )
    page_checksums: bool = _key(
        False,
        "A checksum for every full page, verified at each read: a request whose KV has changed in host memory ends "
        "with an error instead of wrong tokens. Costs CPU time at each read. For the decode server",
        is_general=False,
    )
    hgca_beta: float = _key(
        1.0,
        "A head keeps a token whose attention weight exceeds this multiple of the mean weight. Lower it to keep more",
        (0.0, math.inf),
        is_general=False,
    )
    hgca_alpha: float = _key(
        0.1,
        "Weight of the newest step in the moving average of attention weights",
        (0.0, 1.0),
        is_general=False,
    )
    context_cap_tokens: int | None = _key(
        None,
        "Most tokens that a head of a layer keeps for a request. Default: as many as fit",
        (1, 2**31),
        is_general=False,
    )
    forecast_file: str | None = _key(
        None,
        "Weights that select pages one layer ahead, made by `scripts/train_forecast.py --kind forecast`. Required; "
        "give it to both servers",
        is_general=False,
    )
    pilot_file: str | None = _key(
        None,
        "Weights of page embeddings, made by `scripts/train_forecast.py --kind pilot`. Required; give it to both "
        "servers",
        is_general=False,
    )
    digest_file: str | None = _key(
        None,
        "Coordinates of `calibrated` digests for one model, made by `scripts/train_forecast.py --kind digest`. "
        "Implies `digest: calibrated`; give it to both servers",
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
