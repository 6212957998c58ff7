"""A policy's requirements, for ``doctor``, which runs this in a subprocess: policies import torch.

python -m sglang_scout.cli.policy_check NAME JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from sglang_scout.core.config import FLAGS, OffloadConfig, parse_config
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.forecast import load_weights, weights_file
from sglang_scout.policy.base import Context, make_policy, policies

_MISSING = {
    "cpu": "missing pages are attended to on the CPU",
    "fetch": "missing pages are copied to the device; the CPU computes no attention",
}
_WITH_FEEDBACK = "the CPU attends to the tokens kept from outside the window"


def server_config(
    name: str,
    keys: str,
    budget_tokens: int | None = None,
    flags: Mapping[str, str] = FLAGS,
) -> OffloadConfig:
    """The configuration of a server with this policy; arguments as of :func:`parse_config`."""
    known = policies()
    if name not in known:
        raise ConfigError(
            f"--kv-offload {name!r}: unknown policy; choose one of {', '.join(known)}"
        )
    return parse_config(
        policy=name, policies=known, config=keys, budget_tokens=budget_tokens, flags=flags
    )


def requirements(name: str, keys: str) -> dict[str, Any]:
    """Requirements of a policy with these keys of ``--kv-offload-config``, as plain values.

    Raises:
        ConfigError: one is not met.
    """
    config = server_config(name, keys)
    layers = max(config.exact_layers, default=0) + 1
    policy = make_policy(Context(config, num_layers=layers, page_bytes=1))
    files, named = [], weights_file(config)
    if named is not None:
        kind, path = named
        model = load_weights(path, kind).header.identity
        files.append(f"{kind}_file {path}, of {model.describe()}")
    return {
        "policy": policy.name,
        "budget_tokens": config.budget_tokens,
        "digest": config.digest,
        "worker": policy.route == "cpu",
        "missing": _MISSING[policy.route] if policy.feedback is None else _WITH_FEEDBACK,
        "files": files,
    }


def main(name: str, keys: str) -> int:
    """Prints one JSON object: the requirements, or ``error``."""
    try:
        found = requirements(name, keys)
    except ConfigError as error:
        found = {"error": str(error)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
