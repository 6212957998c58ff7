"""``sglang-scout profile``: per-layer recall intervals from real decoding (paper section 3.4)."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang_scout import __version__
from sglang_scout.cli.device import Placement, place
from sglang_scout.cli.profile_prompts import describe, make_prompts
from sglang_scout.cli.profile_request import (
    Request,
    check_request,
    least_tokens,
    resident_tokens,
    server_config,
    server_words,
)
from sglang_scout.cli.profile_run import RunFailed, ends_orderly, run_workload
from sglang_scout.cli.progress import Progress
from sglang_scout.cli.step_log_file import StepLogFile, ratios_by_age
from sglang_scout.cli.table import columns
from sglang_scout.core.config import WRITTEN_KEYS
from sglang_scout.core.profile import FLAG as PROFILE_FLAG
from sglang_scout.core.profile import (
    PROFILE_VERSION,
    ModelIdentity,
    ProfileCheck,
    RecallProfile,
    choose_interval,
    save_profile,
    selection_of,
)


def make_profile(request: Request, progress: Progress) -> RecallProfile:
    """Run the workload without recall, choose the intervals, and run it with them.

    Raises:
        ConfigError: a wrong value; RunFailed: servers or requests failed.
    """
    check_request(request)
    where = place(request.device)
    prompts = make_prompts(
        request.model_path,
        request.dataset,
        count=request.batch,
        length_tokens=request.input_tokens,
        least_tokens=least_tokens(request.budget_tokens),
    )
    log = _run(request, where, prompts, progress, {"recall": "off"})
    profile = profile_of(log, request, [len(prompt) for prompt in prompts])
    # Written before the check: the intervals are worth keeping whatever happens then.
    save_profile(profile, request.output)
    if request.check:
        path = str(Path(request.output).absolute())
        with tempfile.TemporaryDirectory(prefix="sglang-scout-profile-") as folder:
            # What the first run has written stays; keys that belong to such a file go on to have one.
            elsewhere = {
                key: str(Path(folder) / key) for key in WRITTEN_KEYS if key in request.config
            }
            again = _run(
                request,
                where,
                prompts,
                progress,
                {"recall": "profile", **elsewhere},
                (PROFILE_FLAG, path),
            )
        curves, _ = ratios_by_age(again, request.steps + 1)
        check = ProfileCheck(
            ratios=curves[:, 1:].mean(axis=1).round(4).tolist(),
            curves=curves[:, 1:].round(4).tolist(),
        )
        profile = msgspec.structs.replace(profile, check=check)
        save_profile(profile, request.output)
    return profile


def _run(
    request: Request,
    where: Placement,
    prompts: list[list[int]],
    progress: Progress,
    config: dict[str, Any],
    decode_flags: tuple[str, ...] = (),
) -> StepLogFile:
    # Said also where it is what a server on the CPU would take: one on a GPU would take all that is free.
    cache = {"resident_tokens": resident_tokens(request)}
    return run_workload(
        request.model_path,
        prompts,
        request.steps,
        where=where,
        budget_tokens=request.budget_tokens,
        config={**request.config, **config, **cache},
        decode_flags=decode_flags,
        dtype=request.dtype,
        server_args=server_words(request),
        progress=progress,
    )


def profile_of(log: StepLogFile, request: Request, prompt_tokens: list[int]) -> RecallProfile:
    """The profile of a run without recall.

    Raises:
        RunFailed: the log has not every step.
    """
    # The first step of a request finds none of its pages on the device. What it selects is loaded
    # in every mode; the curve begins after that.
    curves, samples = ratios_by_age(log, request.steps + 1)
    curves, samples = curves[:, 1:], samples[1:]
    if not samples.all():
        raise RunFailed(
            f"profile: no request was recorded at step {int(np.argmin(samples)) + 1} of "
            f"{request.steps}; they ended early, or fit their budget"
        )
    weights = samples.astype(np.float64)
    lengths = f"{min(prompt_tokens)} to {max(prompt_tokens)}"
    if min(prompt_tokens) == max(prompt_tokens):
        lengths = str(prompt_tokens[0])
    return RecallProfile(
        version=PROFILE_VERSION,
        model=Path(request.model_path).resolve().name,
        page_size_tokens=int(log.facts["page_size_tokens"]),
        budget_tokens=request.budget_tokens,
        threshold=request.threshold,
        intervals=[choose_interval(curve, weights, request.threshold) for curve in curves],
        num_layers=log.num_layers,
        workload=f"{len(prompt_tokens)} requests at once, prompts of {lengths} tokens of "
        f"{describe(request.dataset)}, {request.steps} steps, {resident_tokens(request)} resident tokens in all, "
        f"{request.dtype}" + (f", {json.dumps(dict(request.config))}" if request.config else ""),
        identity=msgspec.convert(log.facts["identity"], ModelIdentity),
        samples=samples.tolist(),
        curves=curves.round(4).tolist(),
        made_by=f"sglang-scout {__version__}",
        selection=selection_of(server_config(request)),
    )


def as_text(profile: RecallProfile) -> str:
    """The profile for people."""
    check, last = profile.check, len(profile.samples)
    head: tuple[str, ...] = ("layer", "interval", "ratio after 1 step", "at the interval")
    rows = [(*head, f"after {last}, no recall", "mean with these intervals")]
    for layer, (interval, curve) in enumerate(zip(profile.intervals, profile.curves, strict=True)):
        held = f"{check.ratios[layer]:.3f}" if check else ""
        shown = (curve[0], curve[interval - 1], curve[-1])
        rows.append((str(layer), str(interval), *(f"{x:.3f}" for x in shown), held))
    beta = profile.threshold
    lines = [f"{profile.model}: {profile.workload}", columns(rows, right=range(6))]
    mean = float(np.mean(profile.intervals))
    text = f"Mean interval {mean:.1f} steps at a threshold of {beta:g}. Mean ratio: "
    text += f"{np.mean(profile.curves):.3f} without recall"
    text += f", {np.mean(check.ratios):.3f} with these intervals." if check else "."
    lines.append(text)
    notes = _notes(profile)
    return "\n\n".join([*lines, *(["\n".join(notes)] if notes else [])])


def _notes(profile: RecallProfile) -> list[str]:
    """What is not as one would wish."""
    beta, last = profile.threshold, len(profile.samples)
    at_once = [i for i, n in enumerate(profile.intervals) if n == 1 and profile.curves[i][0] > beta]
    whole = [i for i, n in enumerate(profile.intervals) if n == last]
    notes = []
    if at_once:
        notes.append(
            f"Layers above {beta:g} one step after their pages were loaded: {at_once}. They recall "
            "in every step, and are above all the same; a larger budget would help."
        )
    if whole:
        notes.append(
            f"Layers that stayed below {beta:g} for all {last} steps: {whole}. Longer intervals may "
            "do; more --steps would tell."
        )
    if profile.check:
        above = [i for i, ratio in enumerate(profile.check.ratios) if ratio > beta]
        if above:
            notes.append(f"Layers whose mean is above {beta:g} with these intervals: {above}.")
    return notes


def run(request: Request, *, as_json: bool) -> int:
    """Makes, writes and prints a profile. Returns 0, 1 if a run failed, 130 after Ctrl-C.

    Raises:
        ConfigError: a wrong argument.
    """
    progress = Progress()
    try:
        with ends_orderly():
            profile = make_profile(request, progress)
    except RunFailed as error:
        print(f"sglang-scout: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsglang-scout: interrupted; the servers are stopped", file=sys.stderr)
        return 130
    progress.say(f"wrote {request.output}")
    if request.plot is not None:
        from sglang_scout.cli import profile_plot

        profile_plot.draw(profile, Path(request.plot))
        progress.say(f"wrote {request.plot}")
    print(json.dumps(msgspec.to_builtins(profile)) if as_json else as_text(profile))
    return 0
