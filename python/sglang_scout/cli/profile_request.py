"""What ``sglang-scout profile`` is asked for, and what of it is refused before anything starts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_scout.cli.device import AUTO
from sglang_scout.cli.model_config import read_model
from sglang_scout.core.config import FLAGS as SERVER_FLAGS
from sglang_scout.core.config import PAGE_SIZE_TOKENS, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.files import check_different, check_writable
from sglang_scout.core.parse_config import check_files, check_layers, parse_config, written_files

FLAGS = SERVER_FLAGS | {"budget_tokens": "profile: --budget", "config": "profile: --config"}
LEAST_STEPS = 8
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        output: the profile's file.
        threshold: β.
        steps: decode steps of each request, after its first.
        batch: requests, all at once.
        input_tokens: of each prompt.
        resident_tokens: of the decode server, as the key; None: the budget for each request.
        dataset: see :func:`make_prompts`; None: text that is at hand.
        plot: a picture's file, or None.
        check: run the workload again with the intervals found.
        config: further keys of the servers' --kv-offload-config.
        device: of the servers, "auto", "cpu" or "cuda".
        dtype, server_args: for both servers.
    """

    model_path: str
    output: str
    budget_tokens: int = 2048
    threshold: float = 0.12
    steps: int = 256
    batch: int = 8
    input_tokens: int = 8192
    resident_tokens: int | None = None
    dataset: str | None = None
    plot: str | None = None
    check: bool = True
    device: str = AUTO
    dtype: str = "auto"
    server_args: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


def check_request(request: Request) -> None:
    """Refuse before anything starts what would fail in the end.

    Raises:
        ConfigError: naming flag, value and fix.
    """
    own = sorted({"recall", "resident_tokens", "step_log"} & set(request.config))
    if own:
        raise ConfigError(
            f"profile: --config: {own[0]} is set by the command itself; leave it out"
            + (" and give --resident-tokens" if "resident_tokens" in own else "")
        )
    config = server_config(request)
    server_words(request)
    if not 0.0 < request.threshold < 1.0:
        raise ConfigError(
            f"profile: --threshold {request.threshold}: must lie between 0 and 1, as 0.12"
        )
    if request.steps < LEAST_STEPS:
        raise ConfigError(f"profile: --steps {request.steps}: give at least {LEAST_STEPS}")
    if request.batch < 1:
        raise ConfigError(f"profile: --batch {request.batch}: give at least 1")
    resident = request.resident_tokens
    if resident is not None and (resident <= 0 or resident % PAGE_SIZE_TOKENS):
        raise ConfigError(
            f"profile: --resident-tokens {resident}: must be a positive multiple of "
            f"{PAGE_SIZE_TOKENS}"
        )
    least = least_tokens(request.budget_tokens)
    if request.input_tokens < least:
        raise ConfigError(
            f"profile: --input-len {request.input_tokens}: all of it fits the budget of {request.budget_tokens} "
            f"tokens, so that nothing would be left to the CPU; give at least {least}"
        )
    model = read_model(request.model_path, request.dtype, command="profile")
    context = request.input_tokens + request.steps + 2
    if context > model.max_context_tokens:
        raise ConfigError(
            f"profile: --input-len {request.input_tokens} and --steps {request.steps}: "
            f"{request.model_path} allows {model.max_context_tokens} tokens; lower one of them"
        )
    check_layers(config, model.num_layers, FLAGS["config"])
    check_files(config, FLAGS["config"])
    written = [
        (flag, f"profile: {flag} {value!r}", value)
        for flag, value in (("--output", request.output), ("--plot", request.plot))
    ]
    for _, what, path in written:
        if path is not None:
            check_writable(what, path)
    dataset = ("--dataset", f"profile: --dataset {request.dataset!r}", request.dataset)
    check_different([dataset, *written_files(config, FLAGS["config"]), *written])
    if request.plot is not None and Path(request.plot).suffix not in PICTURES:
        raise ConfigError(
            f"profile: --plot {request.plot!r}: pictures are {', '.join(PICTURES)}; name such a file"
        )


def server_config(request: Request) -> OffloadConfig:
    """What the decode server will have in the first run.

    Raises:
        ConfigError: a wrong budget, or a wrong value in ``request.config``.
    """
    return parse_config(
        policy="scout",
        policies=("scout",),
        budget_tokens=request.budget_tokens,
        config={**request.config, "recall": "off"},
        flags=FLAGS,
    )


def resident_tokens(request: Request) -> int:
    """Capacity of the decode server's cache, over all requests."""
    return request.resident_tokens or request.budget_tokens * request.batch


_OWN_SERVER_FLAGS = {
    "--model-path": "",
    "--model": "",
    "--host": "",
    "--port": "",
    "--nccl-port": "",
    "--device": " and give --device",
    "--dtype": " and give --dtype",
    "--max-running-requests": " and give --batch",
    "--max-total-tokens": " and give --batch and --input-len",
}


def server_words(request: Request) -> list[str]:
    """``request.server_args`` as single words.

    Raises:
        ConfigError: a quotation without an end, or a flag that the command sets itself.
    """
    try:
        words = shlex.split(request.server_args)
    except ValueError as error:
        raise ConfigError(
            f"profile: --server-args {request.server_args!r}: {error}; write it as on a command line"
        ) from None
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if flag.startswith(("--kv-offload", "--disaggregation")) or flag in _OWN_SERVER_FLAGS:
            raise ConfigError(
                f"profile: --server-args: {flag} is set by the command itself; leave it out"
                + _OWN_SERVER_FLAGS.get(flag, "")
            )
    return words


def least_tokens(budget_tokens: int) -> int:
    """The shortest prompt of which some pages stay outside of the budget."""
    return budget_tokens + 2 * PAGE_SIZE_TOKENS
