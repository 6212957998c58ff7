"""Quality cost of page selection in a language model: loss, agreement, planted facts; teacher-forced, no servers.

    python -m benchmark.accuracy.study.run --json docs/results/study.jsonl
    python -m benchmark.accuracy.study.table docs/results/study.jsonl

Documents of real text with planted facts (planted.py) are prefilled with full attention. Then windows are decoded after
them with each setting of settings.py (defined in selection.py), the text after each cut and the questions at it, and
compared with full attention. Documents are processed one at a time with all settings, so an interrupted run leaves
complete pairs; rerunning the command resumes where it stopped.

A row is one setting on one part of one document; every list has an entry for each window:
    setting, and its fields: budget_tokens, digest, reduce, grain, page_tokens, query, ...
    document, source
    part    "text"; "facts": the question is decoded too; "prompt": it is part of the prompt, which is prefilled
    text:   cut, tokens; nats, full_nats, kl, agree, mass    means over the window's tokens; agree: same top-1 token
    others: cut, kind; right, full_right (a list, one per number asked for); nats, full_nats (of the answer's
            numbers, sums); mass
    all:    resident_mass    with a device cache
            cpu_by_layer     if the predicted query attends, CPU compute ratio; changes: [5], see Window; both lists of
                             layers, over all windows
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from benchmark.accuracy import planted
from benchmark.accuracy.planted import real_documents
from benchmark.accuracy.study.decode import Text, Window, decode_window
from benchmark.accuracy.study.model import Model
from benchmark.accuracy.study.selection import Setting
from benchmark.accuracy.study.settings import SETS
from benchmark.progress import Progress
from benchmark.rows import ROOT, Row, RowFile, argument_parser, environment, weights_digest
from sglang_scout.core.forecast import Kind, load_weights

SMOLLM2 = ROOT / ".cache" / "models" / "smollm2-135m"
FULL = Setting()
PARTS = ("facts", "prompt", "text")


def plain_text(model: Model, text: Text, cut: int, setting: Setting) -> Row:
    tokens = text.tokens[cut : cut + planted.WINDOW_TOKENS]
    window = decode_window(model, text, cut, tokens[:-1], setting)
    full = model.log_probs(text.last[cut : cut + len(tokens) - 1])
    found, target = window.log_probs, tokens[1:, None]
    return {
        "cut": cut,
        "tokens": len(target),
        "nats": -float(found.gather(1, target).mean()),
        "full_nats": -float(full.gather(1, target).mean()),
        "kl": float((full.exp() * (full - found)).sum(-1).mean()),
        "agree": float((full.argmax(-1) == found.argmax(-1)).float().mean()),
        **masses(window),
    }


def masses(window: Window) -> Row:
    """Means over layers; of the CPU's part those of each layer."""
    resident = window.resident_mass
    more: Row = {"resident_mass": float(resident.mean())} if resident.any() else {}
    if window.cpu.any():
        more |= {"cpu_by_layer": window.cpu, "changes": window.changes}
    return {"mass": float(window.mass.mean()), **more}


def ask(
    model: Model, text: Text, question: planted.Question, setting: Setting, prefilled: bool = False
) -> Row:
    """``prefilled``: whether the question was."""
    tokens = torch.tensor(question.ask + question.answer)
    whole = len(question.ask) * prefilled
    window = decode_window(model, text, question.cut, tokens[:-1], setting, whole)
    right, nats = [], 0.0
    for begin, end in question.numbers:
        first = len(question.ask) + begin
        target = tokens[first : first + end - begin]
        given = window.log_probs[first - 1 : first - 1 + end - begin]
        right.append(int((given.argmax(-1) == target).all()))
        nats -= float(given.gather(1, target[:, None]).sum())
    found = {"cut": question.cut, "kind": question.kind, "right": right, "nats": nats}
    return {**found, **masses(window)}


def measure(
    model: Model,
    text: Text,
    document: planted.Document,
    part: str,
    setting: Setting,
    full: list[Row],
) -> Row:
    """The fields of one row. ``full``: what `ask` found with full attention, for the parts with questions."""
    if part == "text":
        found = [plain_text(model, text, cut, setting) for cut in planted.CUTS]
    else:
        found = [ask(model, text, q, setting, part == "prompt") for q in document.questions]
        for row, base in zip(found, full, strict=True):
            row |= {"full_right": base["right"], "full_nats": base["nats"]}
    totals = {"cpu_by_layer": torch.mean, "changes": torch.sum}  # over windows
    parts = {name: [row[name] for row in found if name in row] for row in found for name in row}
    return {
        name: totals[name](torch.stack(x), 0).round(decimals=4).tolist()
        if name in totals
        else [*map(_rounded, x)]
        for name, x in parts.items()
    }


def _rounded(x: Any) -> Any:
    return round(x, 5) if isinstance(x, float) else x


def run(args: argparse.Namespace, file: RowFile, progress: Progress) -> None:
    settings: dict[str, Sequence[Setting]] = SETS[args.set]
    model_path = args.model_path
    documents = real_documents(model_path, range(args.documents))
    model = Model(model_path)
    for kind in get_args(Kind):
        path = ROOT / ".cache" / "weights" / f"{model_path.name}-{kind}.npz"
        if path.is_file():
            arrays = load_weights(str(path), kind).arrays
            model.trained |= {name: torch.from_numpy(x) for name, x in arrays.items()}
    for index, document in documents:
        todo = [
            (part, setting)
            for part in args.parts
            for setting in settings.get(part, ())
            if not file.has(setting=setting.name, document=index, part=part)
        ]
        if not todo:
            continue
        # Settings are grouped by digest, so that the digests of a text are built once.
        todo.sort(key=lambda x: (x[1].page_tokens, x[1].digest))
        progress.say(f"document {index}, {document.source}: {len(todo)} settings")
        text = Text(model, torch.tensor(document.tokens))
        full = [ask(model, text, question, FULL) for question in document.questions]
        for part, setting in todo:
            row = measure(model, text, document, part, setting, full)
            place = {"setting": setting.name, "document": index, "part": part}
            file.add(setting.digest, **place, source=document.source, **setting.fields(), **row)
            shown = row["kl"] if part == "text" else row["right"]
            progress.update(f"document {index}, {part}: {setting.name}: {shown}")


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write rows to FILE, or continue it")
    add("--model-path", type=Path, default=SMOLLM2, help="folder of the model")
    add("--set", choices=tuple(SETS), default="main", help="set of settings, see settings.py")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--documents", type=int, default=10)
    args = parser.parse_args(argv)
    path = args.model_path
    if not (path / "config.json").is_file():
        why = "no model there; scripts/smollm2.py makes the default one"
        parser.error(f"--model-path {path}: {why}")
    fields = {"untimed": True, "model": path.name, "dtype": "float32"}
    fields["weights"] = weights_digest(str(path))
    file = RowFile(args.json, environment("study", ("torch",)), fields)
    with torch.no_grad():
        run(args, file, Progress())
    return 0


if __name__ == "__main__":
    sys.exit(main())
