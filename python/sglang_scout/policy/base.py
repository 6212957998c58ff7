"""The parts of a policy: the choices in which GPU-CPU offload methods differ.

The engine queries these objects and never checks which policy it serves. A policy is one file of this folder, named
after it; ``make(context)`` returns its :class:`Policy`. The parts are shared.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sglang_scout.core.config import DEFAULT_DIGEST, FLAGS, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import check_layers
from sglang_scout.core.profile import RecallProfile
from sglang_scout.ops.residency import PageUses
from sglang_scout.policy.salient_tokens import SalientTokens

Ids = npt.NDArray[np.int64]
Route = Literal["cpu", "fetch"]
"""Missing pages are attended to on the CPU in place; or copied to the device ahead of the layer, for the real query."""


@dataclass(frozen=True)
class SelectionRule:
    """How a page is summarised and scored.

    Attributes:
        kind: name of the digest's layout (``engine/digest_pool.py``).
        sink_pages, recent_pages: leading and newest full pages that are always selected.
        mass: select no more pages than hold this share of the attention (``ops/select.py``).
        only_selected: attend to the selected pages only, not to other resident ones.
        reweigh: if digests estimate a page's mass, re-weight the predicted query's result by their estimates for the
            real query.
    """

    kind: str = DEFAULT_DIGEST
    sink_pages: int = 1
    recent_pages: int = 1
    mass: float = 1.0
    only_selected: bool = True
    reweigh: bool = True

    @classmethod
    def of(cls, config: OffloadConfig, **choices: Any) -> SelectionRule:
        """As the keys of ``--kv-offload-config`` say; ``choices`` are the policy's own.

        Raises:
            ConfigError: calibrated digests without their file, or with a policy or a grain that has no use for them.
        """
        if config.digest == "calibrated":
            other = ""
            if "digest_file" not in policies()[config.policy]:
                other = f"{FLAGS['policy']} {config.policy}"
            elif config.grain != "layer":
                other = f"grain = {config.grain!r}"
            if other:
                raise ConfigError(
                    f"{FLAGS['config']}: digest = 'calibrated' cannot be used with {other}; drop one"
                )
            trained_file(config, "digest_file")
        keys = "sink_pages", "recent_pages", "mass", "reweigh"
        return cls(config.digest, **{key: getattr(config, key) for key in keys}, **choices)


@dataclass(frozen=True)
class QuerySource:
    """Which query selects a layer's pages, and attends to the missing ones on the CPU.

    One layer ahead it is W_q of layer l+1 applied to the input of layer l (ScoutAttention Algorithm 1, line 4). Layer 0
    has no previous layer: its query comes from its own input, exact but not ahead.

    Attributes:
        is_ahead: False: every layer's own query, without prediction, and the device waits.
        exact: layers that use their own query, because it is predicted poorly from the previous layer's input.
        attends: whether a predicted query may attend. If it can only select, the real query attends to missing pages.
    """

    is_ahead: bool = True
    exact: tuple[int, ...] = ()
    attends: bool = True

    @classmethod
    def of(cls, config: OffloadConfig) -> QuerySource:
        """As the keys of ``--kv-offload-config`` say."""
        return cls(config.precompute, config.exact_layers)

    def targets(self, layer: int, num_layers: int) -> tuple[int, ...]:
        """Layers whose query is predicted at the input of ``layer``; the others use the real one in their own layer."""
        if not self.is_ahead:
            return ()
        ahead = (layer + 1,) if layer + 1 < num_layers and layer + 1 not in self.exact else ()
        return (0, *ahead) if layer == 0 else ahead


RESULT_DELAY_STEPS = 2
"""Boundaries until the host knows a step's selections."""


@dataclass(frozen=True)
class StepReport:
    """Measurements up to a step boundary; all that a residency decision may depend on.

    L layers, B rows of the last step whose selections are known. Pages are (layer, page) pairs, K and V together.

    Attributes:
        step: the upcoming step.
        budget_pages: pages selected per request and layer, over all its lists.
        ages: ``[B]`` int64, steps of each row before that one.
        missed: ``[L, B]`` int64, selected pages that were not resident.
        absent: ``[L, B]`` int64, those of them still neither resident nor in flight.
        started: ``[L]`` int64, pages whose copy started at the last boundary.
        landed, used: ``[L]`` int64, pages that became resident before the last known step, and those of
            them that it selected.
        late_pages: pages whose copy started in an earlier step and is still in flight.
        step_us: measured time of a step, smoothed; 0 until known.
        link_pages_per_us: measured speed of finished copies, smoothed; 0 until known.
        spare_slots: ``[L]`` int64, free slots that are not reserved.
    """

    step: int
    budget_pages: int
    ages: Ids
    missed: Ids
    absent: Ids
    started: Ids
    landed: Ids
    used: Ids
    late_pages: int
    step_us: float = 0.0
    link_pages_per_us: float = 0.0
    spare_slots: Ids = field(default_factory=lambda: np.zeros(0, np.int64))


class Residency:
    """Which pages stay on the device and when missing ones are recalled. This one recalls nothing.

    Attributes:
        pin_share: share of a layer's slots whose pages, the most frequent, are evicted only by forced pages.
        patience_us: how long a step boundary waits for copies of the previous step; None: until they are done.
    """

    pin_share: float = 0.0
    patience_us: float | None = None

    def plan(self, report: StepReport) -> None:
        """Step boundary: process the measurements, and decide the upcoming step's recalls."""

    def pick(
        self, layers: Ids, missed: npt.NDArray[np.int32], ages: Ids, uses: PageUses
    ) -> tuple[Ids, Ids]:
        """The pages that ``layers`` would like to recall.

        Args:
            layers: ``[n]`` ascending.
            missed: ``[n, B, k]`` pages that were not resident, -1 padded.
            ages: ``[B]`` steps of each request before that.
            uses: decayed frequency of every page of every layer.
        Returns:
            Layers and pages, distinct pairs.
        """
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def fill_pages(self) -> int:
        """Pages that this step may prefetch before any miss, into spare slots."""
        return 0

    def loaded_pages(self, full: int, budget_pages: int) -> int:
        """How many newest pages of a new request of ``full`` pages are resident at its first step; 0: those of the
        prompt's hint, up to the budget."""
        return full if full <= budget_pages else 0

    def reserve(self, lengths: Ids, max_new: Ids) -> int:
        """Slots of each layer to reserve for pages that requests of ``lengths`` ``[B]`` tokens will open; each may
        still generate ``max_new`` ``[B]``."""
        return 0

    def describe(self) -> dict[str, Any]:
        """State for ``/server_info``: plain numbers, strings and lists."""
        return {}


def trained_file(config: OffloadConfig, key: str) -> str:
    """The file of trained weights that ``key`` names.

    Raises:
        ConfigError: it names none.
    """
    path: str | None = getattr(config, key)
    if path is None:
        kind = key.removesuffix("_file")
        raise ConfigError(
            f"{FLAGS['policy']} {config.policy}: needs {FLAGS['config']} '{{\"{key}\": FILE}}'; make one with "
            f"scripts/train_forecast.py --kind {kind}"
        )
    return path


@dataclass(frozen=True)
class Policy:
    """A named set of choices. With ``feedback`` nothing is selected: the device attends to a recent window, and the CPU
    to older tokens that were salient in it."""

    name: str
    rule: SelectionRule
    query: QuerySource
    route: Route
    residency: Residency
    feedback: SalientTokens | None = None


@dataclass(frozen=True)
class Context:
    """Inputs for making a policy; ``page_bytes`` are those of K and V of one page in one layer."""

    config: OffloadConfig
    num_layers: int
    page_bytes: int
    profile: RecallProfile | None = None

    @property
    def step_pages(self) -> int:
        """Pages of ``recall_step_mib``."""
        return max(1, int(self.config.recall_step_mib * 2**20) // self.page_bytes)


def _policies() -> dict[str, ModuleType]:
    folder = importlib.import_module(__package__).__path__
    names = [info.name for info in pkgutil.iter_modules(folder)]
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "make")}


def policies() -> dict[str, dict[str, Any]]:
    """Policy files of this folder, each with its ``DEFAULTS``, which override keys' defaults."""
    return {name: getattr(module, "DEFAULTS", {}) for name, module in _policies().items()}


def make_policy(context: Context) -> Policy:
    """The policy that the configuration names."""
    check_layers(context.config, context.num_layers)
    policy: Policy = _policies()[context.config.policy].make(context)
    return policy
