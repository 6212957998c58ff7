"""The policies that are compared, each as flags of a decode server.

    full              full attention, in plain PyTorch
    scout             predicted queries select pages by bounds, one layer ahead; recall is adaptive
    paper             the paper's set-up, at the intervals that benchmark.server.recall has profiled for the budget
    scout-rotated     like scout with two-bit rotated digests, the default
    scout-real-query  the layer's own query selects them: shows the cost of prediction
    quest             the layer's own query, and attention over exactly the selected pages; no layer-ahead
                      CPU attention, and other resident pages are not used
    recent            the first page and the newest pages
    infinigen         predicted queries select by rotated digests, all selected pages are fetched
    sparda, rheo      with the weights that scripts/train_forecast.py trains for the model by default
    hgca              a recent window on the device, half of the budget; the CPU attends to what each head keeps

`scout+KEY=VALUE+...` is `scout` with these additional keys of ``--kv-offload-config``, e.g. `scout+recall=off`; null
leaves a key out: `hgca+context_cap_tokens=null`, as in its paper.
``budget_tokens`` counts full pages. All but `full` also attend to the partially filled page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_scout.core.config import FLAGS, PAGE_SIZE_TOKENS
from sglang_scout.policy import policies

WEIGHTS = Path(__file__).resolve().parents[2] / ".cache" / "weights"
FULL = "full"
PROFILES = WEIGHTS.with_name("profiles")
NAMES = (FULL, "scout", "scout-rotated", "scout-real-query", "quest", "recent")
SYSTEMS = ("infinigen", "sparda", "rheo", "hgca")
ALL = (*NAMES, "paper", *SYSTEMS)
REAL_QUERY = {"digest": "minmax", "precompute": False}
OWN_CONFIG: dict[str, dict[str, Any]] = {
    "scout": {"digest": "minmax"},
    "paper": {"paper": True},
    "scout-rotated": {"digest": "rotated-2"},
    "scout-real-query": REAL_QUERY,
    "quest": REAL_QUERY,
    "infinigen": {},
}


@dataclass(frozen=True)
class Setting:
    """A policy with its budget; `full` has none."""

    policy: str
    budget_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.base not in ALL:
            raise ValueError(f"policy {self.policy!r}: choose one of {', '.join(ALL)}")
        if (self.budget_tokens is None) != (self.policy == FULL):
            given = f"policy {self.policy}, budget {self.budget_tokens}"
            raise ValueError(f"{given}: only `full` has none")

    @property
    def base(self) -> str:
        return self.policy.partition("+")[0]

    @property
    def name(self) -> str:
        return self.policy if self.budget_tokens is None else f"{self.policy}-{self.budget_tokens}"

    @property
    def prefill_policy(self) -> str:
        """Of a prefill server whose hints it can use."""
        return "hgca" if self.base == "hgca" else "scout"

    def _flag_tokens(self) -> int:
        """Value of ``--kv-offload-budget``; for hgca the window, the other half is for the CPU."""
        budget = self.budget_tokens or 0
        return budget if self.base != "hgca" else budget // 2 // PAGE_SIZE_TOKENS * PAGE_SIZE_TOKENS

    def offload_config(self, model: str) -> dict[str, Any]:
        """The keys of ``--kv-offload-config``; ``model``: the name of its folder."""
        more = {}
        for pair in self.policy.split("+")[1:]:
            key, _, value = pair.partition("=")
            is_json = value[:1] in "[0123456789-" or value in ("true", "false", "null")
            more[key] = json.loads(value) if is_json else value
        config = {**self._own_config(model), **more}
        return {key: value for key, value in config.items() if value is not None}

    def _own_config(self, model: str) -> dict[str, Any]:
        if trained := {"sparda": "forecast", "rheo": "pilot"}.get(self.base):
            return {f"{trained}_file": str(WEIGHTS / f"{model}-{trained}.npz")}
        if self.base == "hgca":
            return {"context_cap_tokens": self._flag_tokens()}
        if self.base == "recent":
            pages = (self.budget_tokens or 0) // PAGE_SIZE_TOKENS
            return REAL_QUERY | {"sink_pages": 1, "recent_pages": pages - 1}
        return OWN_CONFIG[self.base]

    def decode_flags(self, more: dict[str, Any] | None = None, model: str = "") -> list[str]:
        """Flags of the decode server; ``more`` are further keys of its configuration, if applicable to
        this policy."""
        if self.policy == FULL:
            return []
        own = self.offload_config(model)
        policy = self.base if self.base in SYSTEMS else "scout"
        has_ahead = {**policies()[policy], **own}.get("precompute", True)
        used = {key: x for key, x in (more or {}).items() if has_ahead or key != "exact_layers"}
        config = {**own, **used}
        words = ["--kv-offload", policy, "--kv-offload-budget", str(self._flag_tokens())]
        if self.base == "paper":
            words += [FLAGS["recall_profile"], str(PROFILES / f"paper-{self.budget_tokens}.json")]
        return [*words, FLAGS["config"], json.dumps(config)] if config else words


def grid(names: list[str], budgets: list[int]) -> list[Setting]:
    """`full` once, and each other policy with each budget, grouped by budget."""
    found = [Setting(FULL)] if FULL in names else []
    others = [policy for policy in names if policy != FULL]
    return found + [Setting(policy, budget) for budget in budgets for policy in others]
