"""The policies: each a module or a folder with its name, here or in a folder that several share.

``make(context)`` returns its :class:`Policy`; ``DEFAULTS`` override keys' defaults. Without its file or folder a policy
does not exist, and the others are as before.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from sglang_scout.core.config import FLAGS, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import check_layers
from sglang_scout.core.forecast import Kind, PageWeights, load_weights
from sglang_scout.core.profile import RecallProfile
from sglang_scout.engine.digests import KINDS, DigestKind
from sglang_scout.engine.policy import Policy, SelectionRule


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


@cache
def _policies() -> dict[str, ModuleType]:
    names = (info.name for info in pkgutil.walk_packages(__path__, f"{__name__}."))
    # Kernels import triton.
    modules = [importlib.import_module(name) for name in names if not name.endswith(".kernels")]
    made = {x.__name__.rpartition(".")[2]: x for x in modules if hasattr(x, "make")}
    return dict(sorted(made.items()))


def policies() -> dict[str, dict[str, Any]]:
    """All policies, each with its ``DEFAULTS``, which override keys' defaults."""
    return {name: getattr(module, "DEFAULTS", {}) for name, module in _policies().items()}


def make_policy(context: Context) -> Policy:
    """The policy that the configuration names.

    Raises:
        ConfigError: settings that it cannot have, or files that it cannot read.
    """
    check_layers(context.config, context.num_layers)
    policy: Policy = _policies()[context.config.policy].make(context)
    return policy


def trained_weights(config: OffloadConfig, kind: Kind) -> PageWeights:
    """The weights that the key of this ``kind`` names. Raises :class:`ConfigError` if it names none."""
    key = f"{kind}_file"
    path: str | None = getattr(config, key)
    if path is None:
        raise ConfigError(
            f"{FLAGS['policy']} {config.policy}: needs {FLAGS['config']} '{{\"{key}\": FILE}}'; make one with "
            f"scripts/train_forecast.py --kind {kind}"
        )
    return load_weights(path, kind)


def selection_rule(
    config: OffloadConfig, *own_kinds: type[DigestKind], **choices: Any
) -> SelectionRule:
    """The rule that the keys of ``--kv-offload-config`` describe.

    Args:
        own_kinds: of digest, that the policy has besides the common ones.
        choices: of the policy, whatever the keys say.
    """
    kinds = KINDS | {kind.name: kind for kind in own_kinds}
    keys = {key: getattr(config, key) for key in ("sink_pages", "recent_pages", "reweigh")}
    return SelectionRule(kinds[config.digest], by_head=config.grain == "head", **keys | choices)
