"""The configuration: validated once, in ``flags.py``, then passed down, never read from the environment.

The fields of :class:`OffloadConfig` are the table of all keys, by which msgspec checks values, and which
docs/reference/configuration.md shows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from msgspec import Meta

PAGE_SIZE_TOKENS = 32  # implied by --kv-offload (the paper's block size)

Digest = Literal["minmax", "rotated-2"]
"""Page digests to choose from; see ``engine/digests.py``."""

DEFAULT_DIGEST = "rotated-2"
# Half of the paper's (section 4.3), at a smaller loss with the default digest (docs/results/accuracy.md).
DEFAULT_BUDGET_TOKENS = 1024
PAPER_BUDGET_TOKENS = 2048
DEFAULT_HOST_SHARE = 0.5  # of the available memory, for KV pages without --kv-offload-host-gb
DEFAULT_RECALL_THRESHOLD = 0.12  # the paper's β: CPU compute ratio not to exceed (section 3.4)
LARGE = 2**30  # limits from here on keep out what no machine has, and are not in the documents
# By the argument of `parse_config`.
FLAGS = {
    "policy": "--kv-offload",
    "budget_tokens": "--kv-offload-budget",
    "host_gb": "--kv-offload-host-gb",
    "recall_profile": "--kv-offload-recall-profile",
    "cpus": "--kv-offload-cpus",
    "config": "--kv-offload-config",
}
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Pages = Annotated[int, Meta(ge=0, le=2**20)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
ResidentTokens = Annotated[int, Meta(ge=PAGE_SIZE_TOKENS, le=2**40, multiple_of=PAGE_SIZE_TOKENS)]


@dataclass(frozen=True)
class Key:
    """A key of ``--kv-offload-config``: metadata of a field of :class:`OffloadConfig`."""

    kind: Any  # type of its values with their limits, as msgspec checks it
    default: Any
    help: str  # as in docs/reference/configuration.md; ``Default: …`` at its end says how a default is computed
    is_written: bool = False  # it names a file that the server writes
    is_general: bool = True  # False: only for policies that have it among their defaults
    is_public: bool = True  # False: for tests and measurements, not in user documents

    @property
    def choices(self) -> tuple[str, ...]:
        """Its values, if they are a few words."""
        return tuple(x for x in get_args(self.kind) if isinstance(x, str))

    @property
    def values(self) -> str:
        if self.choices:
            return ", ".join(self.choices)
        limits: Meta | None = next(iter(getattr(self.kind, "__metadata__", ())), None)
        if limits is None:
            return {bool: "true, false", str: "a file"}.get(self.kind, "a list of layers")
        if limits.multiple_of is not None:
            return f"multiples of {limits.multiple_of}"
        is_open = limits.le is None or limits.le >= LARGE
        return f"{limits.ge:g} or more" if is_open else f"{limits.ge:g} to {limits.le:g}"


def _key(default: Any, help: str, **rules: Any) -> Any:
    return field(default=default, metadata={"help": help, **rules})


_for_tests = partial(_key, is_public=False)
_of_policies = partial(_key, is_general=False)


@dataclass(frozen=True)
class OffloadConfig:
    """The validated configuration: the server flags, then the keys of ``--kv-offload-config``."""

    policy: str = "none"
    budget_tokens: int = DEFAULT_BUDGET_TOKENS
    host_gb: float | None = None
    recall_profile: str | None = None
    cpus: tuple[int, ...] | None = None
    page_size_tokens: int = PAGE_SIZE_TOKENS

    resident_tokens: ResidentTokens | None = _key(
        None,
        "Size of the device's cache of resident pages, in tokens over all requests. Raise it if the CPU compute ratio "
        "stays high. Lower it to leave memory to digests, and so to more host pages; more work "
        "then stays with the CPU. Default: on the CPU device the budget times `--max-running-requests`; on a CUDA "
        "device what the digests leave",
    )
    digest: Digest = _key(
        DEFAULT_DIGEST,
        "Summary of each page from which pages are selected. `minmax`, the paper's, takes 0.4 of the memory of "
        "`rotated-2`, but finds the important pages less well (measured on one small model). Give the same to both "
        "servers",
    )
    exact_layers: tuple[Annotated[int, Meta(ge=0)], ...] = _key(
        (),
        "Layers that select pages with their real query and then wait for CPU attention. If accuracy suffers, list "
        "the layers that `sglang-scout profile` shows with a cosine below 0.8: their queries are predicted poorly",
    )
    recall: Literal["off", "fixed", "adaptive"] = _key(
        "adaptive",
        "When a layer copies its missing pages to the device. `adaptive`: when its CPU compute ratio would exceed "
        "`recall_threshold`. `fixed`: at the intervals of `--kv-offload-recall-profile`, or without a profile every "
        "`recall_interval` steps. `off`: only a new request's first pages. Serve with `adaptive`; the others are for "
        "a stable workload or for comparison",
    )
    recall_interval: Count = _key(
        8,  # the paper's profiled mean is 8.7
        "Steps between two recalls of a layer with `recall: fixed`. With `adaptive` it is only the first estimate. A "
        "profile's intervals take its place",
    )
    recall_threshold: Share | None = _key(
        None,
        "CPU compute ratio that no layer should exceed with `adaptive` (the paper's β). Lower it to move work from "
        "the CPU to the link, raise it if steps wait for recalls. With `fixed`, a profile of a higher one is refused. "
        f"Default: the profile's threshold, or {DEFAULT_RECALL_THRESHOLD} without a profile",
    )
    recall_step_mib: Annotated[float, Meta(ge=0.001, le=2**30)] = _key(
        256.0,  # half of the paper's 20 ms at 25 GB/s
        "Most MiB that `adaptive` copies in one step, on each rank. Choose half of what the link copies in the time "
        "of a step; lower it if steps wait for recalls",
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

    paper: bool = _of_policies(
        False,
        f"The paper's choices: `digest: minmax`, a budget of {PAPER_BUDGET_TOKENS} tokens, results of CPU attention "
        "merged as computed with the predicted query, and `recall: fixed` at profiled intervals: the decode server "
        "needs `--kv-offload-recall-profile`, made with a threshold of at most "
        f"{DEFAULT_RECALL_THRESHOLD}. What other flags and keys say comes first. To compare with the paper; give it "
        "to both servers",
    )
    page_checksums: bool = _of_policies(
        False,
        "A checksum for every full page, verified at each read: a request whose KV has changed in host memory ends "
        "with an error instead of wrong tokens. Costs CPU time at each read. For the decode server",
    )
    hgca_beta: Annotated[float, Meta(ge=0.0)] = _of_policies(
        1.0,
        "A head keeps a token whose attention weight exceeds this multiple of the mean weight. Lower it to keep more",
    )
    hgca_alpha: Share = _of_policies(
        0.1, "Weight of the newest step in the moving average of attention weights"
    )
    context_cap_tokens: Count | None = _of_policies(
        None,
        "Most tokens that a head of a layer keeps for a request: those with the most attention. Default: as many as "
        "fit",
    )
    forecast_file: str | None = _of_policies(
        None,
        "Weights that select pages one layer ahead, made by `scripts/train_forecast.py --kind forecast`. Required; "
        "give it to both servers",
    )
    pilot_file: str | None = _of_policies(
        None,
        "Weights of page embeddings, made by `scripts/train_forecast.py --kind pilot`. Required; give it to both "
        "servers",
    )

    context_share: Share = _for_tests(0.0, "Memory for kept tokens, as a share of the host pages'")
    grain: Literal["layer", "head"] = _for_tests(
        "layer", "Who selects pages: all heads of a layer, or each"
    )
    sink_pages: Pages = _for_tests(1, "First pages that are always selected")
    recent_pages: Pages = _for_tests(1, "Newest full pages that are always selected")
    reweigh: bool = _for_tests(
        True, "Re-weight the CPU's part by the digests' estimate for the real query"
    )
    precompute: bool = _for_tests(True, "False: missing pages wait for the real query")
    transport: Literal["auto", "host", "graph"] = _for_tests(
        "auto", "Who posts missing pages: the host, or kernels"
    )
    verify: bool = _for_tests(False, "Compare every layer with fp32 attention over host pages")
    dummy_kv: bool = _for_tests(False, "With the fake transfer backend: pages of seeded noise")
    trace_steps: Annotated[int, Meta(ge=1, le=10**6)] = _for_tests(64, "Steps that the trace keeps")

    @property
    def budget_pages(self) -> int:
        """Pages selected per list, step and layer: the k of top-k."""
        return self.budget_tokens // self.page_size_tokens

    def lists(self, num_kv_heads: int) -> int:
        """Selection lists of a request in a layer."""
        return num_kv_heads if self.grain == "head" else 1

    def of_rank(self, rank: int) -> OffloadConfig:
        """The same for a tensor-parallel rank: from rank 1 on it writes to files with ``.rankN`` before the suffix."""
        if rank == 0:
            return self
        paths = {key: Path(value) for key in WRITTEN_KEYS if (value := getattr(self, key))}
        own = {key: str(p.with_name(f"{p.stem}.rank{rank}{p.suffix}")) for key, p in paths.items()}
        return dataclasses.replace(self, **own)


def _kind(hint: Any) -> Any:
    return get_args(hint)[0] if NoneType in get_args(hint) else hint


_HINTS = get_type_hints(OffloadConfig, include_extras=True)
KEYS = {
    f.name: Key(_kind(_HINTS[f.name]), f.default, **f.metadata)
    for f in dataclasses.fields(OffloadConfig)
    if f.metadata
}
PUBLIC_KEYS = tuple(name for name, key in KEYS.items() if key.is_public and key.is_general)
WRITTEN_KEYS = tuple(name for name, key in KEYS.items() if key.is_written)
