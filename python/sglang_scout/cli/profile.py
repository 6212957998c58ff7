"""``sglang-scout profile``: per-layer recall intervals from a step log (paper section 3.4)."""

from __future__ import annotations

import argparse
import json

import msgspec
import numpy as np

from sglang_scout import __version__
from sglang_scout.cli import columns
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import check_different
from sglang_scout.core.profile import (
    COLD_STEPS,
    PROFILE_VERSION,
    RecallProfile,
    StepLogFile,
    choose_interval,
    ratios_by_age,
    read_step_log,
    save_profile,
)

DESCRIPTION = (
    "Choose how often each layer recalls pages. First let a decode server serve your workload without recall and write "
    'a step log (--kv-offload-config \'{"step_log": "FILE", "recall": "off"}\'). This command takes for each layer the '
    "longest interval at which the share of pages that the CPU computes stays within the threshold. Give the result to "
    'the decode server with --kv-offload-recall-profile, and set "recall": "fixed".'
)
MIN_STEPS = 8
MIN_COSINE = 0.8  # of predicted and real queries; layers with a lower one are listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("step_log", metavar="STEP_LOG", help="step log of a decode server")
    add("--output", required=True, metavar="FILE", help="JSON file to write the profile to")
    ratio = "largest share of a layer's budget that the CPU may compute (default: 0.12)"
    add("--threshold", type=float, default=0.12, metavar="RATIO", help=ratio)
    add("--plot", metavar="FILE", help="also plot the profile, to a .png, .svg or .pdf file")


def run(args: argparse.Namespace) -> int:
    files = {"STEP_LOG": args.step_log, "--output": args.output, "--plot": args.plot}
    check_different({f"profile: {flag} {path!r}": path for flag, path in files.items() if path})
    profile = profile_of(read_step_log(args.step_log), args.threshold)
    what, fix = f"--output {args.output!r}: cannot be written", "name another file"
    try:
        save_profile(profile, args.output)
        if args.plot is not None:
            what, fix = f"--plot {args.plot!r}", "name a .png, .svg or .pdf in a folder that exists"
            draw(profile, args.plot)
    except ImportError:
        raise ConfigError(
            "profile: --plot needs matplotlib; pip install 'sglang-scout[plot]'"
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"profile: {what}: {why}; {fix}") from None
    print(json.dumps(msgspec.to_builtins(profile)) if args.json else as_text(profile))
    return 0


def profile_of(log: StepLogFile, threshold: float) -> RecallProfile:
    """The profile of a run without recall. Raises ConfigError, also for too few steps of requests beyond the budget."""
    facts = log.facts
    if not 0.0 < threshold < 1.0:
        raise ConfigError(f"profile: --threshold {threshold}: must be between 0 and 1; give 0.12")
    if facts.recall != "off":
        raise ConfigError(
            f'profile: the step log was recorded with "recall": "{facts.recall}"; record one with "recall": "off"'
        )
    # The first step's selection is loaded in every mode; the curve starts after that.
    curves, samples = ratios_by_age(log)
    steps = int(np.argmin(np.append(samples[COLD_STEPS:], 0)))
    after = slice(COLD_STEPS, COLD_STEPS + steps)
    curves, samples = curves[:, after], samples[after]
    if steps < MIN_STEPS:
        raise ConfigError(
            f"profile: the step log has {steps} steps of requests longer than the budget of "
            f"{facts.budget_tokens} tokens, but at least {MIN_STEPS} are needed; send longer prompts, or "
            "generate more tokens"
        )
    requests = (pair for step in log.steps for pair in zip(step.ages, step.full_pages, strict=True))
    pages = [pages for age, pages in requests if age == 0 and pages > log.budget_pages]
    lengths = "-".join(str(n * facts.page_size_tokens) for n in sorted({min(pages), max(pages)}))
    known = [step.query_cosine for step in log.steps if step.query_cosine]
    cosines = np.ma.masked_invalid(np.array(known or [[None] * facts.layers], np.float64))
    kept = "model page_size_tokens budget_tokens identity selection".split()
    return RecallProfile(
        version=PROFILE_VERSION,
        threshold=threshold,
        intervals=[choose_interval(curve, samples, threshold) for curve in curves],
        num_layers=facts.layers,
        workload=f"{len(pages)} requests of {lengths} tokens, {steps} steps",
        samples=samples.tolist(),
        curves=curves.round(4).tolist(),
        made_by=f"sglang-scout {__version__}",
        **{name: getattr(facts, name) for name in kept},
        query_cosine=cosines.mean(axis=0).round(4).tolist(),  # None where none is known
    )


def as_text(profile: RecallProfile) -> str:
    beta, last = profile.threshold, len(profile.samples)
    rows = [("layer", "interval", "ratio after 1 step", "at the interval", f"after {last}")]
    at_once, whole = [], []
    for layer, (interval, curve) in enumerate(zip(profile.intervals, profile.curves, strict=True)):
        ratios = (curve[0], curve[interval - 1], curve[-1])
        rows.append((str(layer), str(interval), *(f"{x:.3f}" for x in ratios)))
        at_once += [layer] * (interval == 1 and curve[0] > beta)
        whole += [layer] * (interval == last)
    notes = [
        f"Mean interval {np.mean(profile.intervals):.1f} steps at a threshold of {beta:g}; mean ratio "
        f"{np.mean(profile.curves):.3f} without recall."
    ]
    if at_once:
        notes.append(
            f"Layers above {beta:g} one step after their pages were loaded: {at_once}. They recall "
            "in every step and still exceed the threshold; a larger budget would help."
        )
    if whole:
        notes.append(
            f"Layers that stayed at {beta:g} or below for all {last} steps: {whole}. Longer intervals may "
            "suffice; record more steps to find out."
        )
    cosines = ((i, x) for i, x in enumerate(profile.query_cosine) if x is not None)
    if poor := [f"{i} ({x:.2f})" for i, x in cosines if x < MIN_COSINE]:
        notes.append(
            f"Layers whose query is hard to predict (cosine below {MIN_COSINE:g}): {', '.join(poor)}. "
            'If answers suffer, list them in "exact_layers": they then wait for CPU attention.'
        )
    head = f"{profile.model}: {profile.workload}"
    return "\n\n".join([head, columns(rows, right=range(5)), "\n".join(notes)])


def draw(profile: RecallProfile, target: str) -> None:
    """Writes a plot like the paper's Figure 6a: ratios by step, and the intervals. Raises OSError, or ValueError for a
    format that matplotlib does not know."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(4, 3))
    colors = colormaps["viridis"](np.linspace(0.0, 0.9, profile.num_layers))
    steps = range(1, len(profile.samples) + 1)
    for color, curve in zip(colors, profile.curves, strict=True):
        left.plot(steps, curve, color=color, linewidth=0.6)
    left.plot(steps, np.mean(profile.curves, axis=0), color="black", label="mean of the layers")
    left.axhline(profile.threshold, color="#e15759", linestyle="--", label="threshold")
    title = f"Without recall: mean {np.mean(profile.curves):.3f}"
    about = "steps after a request's pages were loaded"
    left.set(title=title, xlabel=about, ylabel="CPU compute ratio", ylim=(0, None))
    left.legend(fontsize="small")
    right.bar(range(profile.num_layers), profile.intervals, color=colors)
    title = f"Recall intervals: mean {np.mean(profile.intervals):.1f}"
    right.set(title=title, xlabel="layer", ylabel="steps")
    head = f"{profile.model}, budget {profile.budget_tokens} tokens: {profile.workload}"
    figure.suptitle(head, fontsize="medium")
    figure.savefig(target, dpi=130)
