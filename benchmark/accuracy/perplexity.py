"""Perplexity on held-out texts, teacher-forced through the decode path: full attention against the others.

    python benchmark/accuracy/perplexity.py --json docs/results/perplexity.jsonl

The end of each text is forced token by token on the decode server, by a grammar that allows exactly one token at each
step, so every step has the right text before it and attends to it with the policy that is measured. A mask hides what
the model thought of the token, so the server returns the hidden state of each step (--enable-return-hidden-states) and
the log-probabilities are computed here: float32 products with the output embedding over the whole vocabulary. The
first forced token comes from the prefill server and does not count.

Texts end with questions and answers. An answer can be known from the text; a question's words cannot, whatever the
attention, so the two are reported apart. A row is one setting:
    texts, length_tokens, forced_tokens        of each text
    answer, other        tokens; nats (mean of all tokens); perplexity; nats_by_text, tokens_by_text
    reference_gap_nats   with --check, for full: largest difference of a token from a plain forward pass by transformers
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import tasks  # noqa: E402
from asking import cpu_ratio  # noqa: E402
from fleet import Fleet  # noqa: E402
from policies import FULL, NAMES, Setting, grid  # noqa: E402
from questions import (  # noqa: E402
    FORCING_ENVIRONMENT,
    FORCING_FLAGS,
    forcing_grammar,
)
from row_file import RowFile  # noqa: E402
from suite import (  # noqa: E402
    PACKAGES,
    add_common_arguments,
    complete,
    groups_of,
    key_of,
    shared_fields,
)

from progress import Progress  # noqa: E402
from rows import Row, environment  # noqa: E402
from servers.server_process import ends_orderly  # noqa: E402

BENCHMARK = "perplexity"


def make_text(length_tokens: int, forced_tokens: int, seed: int, index: int) -> tasks.Document:
    """A text whose last ``forced_tokens`` are questions of two tasks with their answers."""
    weights = dict.fromkeys(tasks.TASKS, 1.0)
    return tasks.make_document(weights, length_tokens, [seed, index], forced_tokens / length_tokens)


def counted_tokens(text: tasks.Document, forced_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in ``text`` [T] of the answers' tokens and of the others that are scored.

    The first forced token is not: it comes from the prefill server.
    """
    is_answer = torch.zeros(len(text.tokens), dtype=torch.bool)
    for _, begin, end in text.answers:
        is_answer[begin:end] = True
    is_scored = torch.zeros_like(is_answer)
    is_scored[len(text.tokens) - forced_tokens + 1 :] = True
    return (is_answer & is_scored).nonzero().ravel(), (~is_answer & is_scored).nonzero().ravel()


def forced_payload(text: tasks.Document, forced_tokens: int) -> dict[str, Any]:
    prompt, forced = text.tokens[:-forced_tokens].tolist(), text.tokens[-forced_tokens:].tolist()
    return {
        "input_ids": prompt,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": forced_tokens,
            "ignore_eos": True,
            "ebnf": forcing_grammar(forced),
        },
        "return_hidden_states": True,
    }


def hidden_of_steps(answer: dict[str, Any], forced: Sequence[int]) -> torch.Tensor:
    """The decode steps' hidden states [forced - 1, d] float32, after the last norm.

    Raises ValueError if other tokens were decoded, or if states are missing.
    """
    given = list(answer.get("output_ids") or [])
    if given != list(forced):
        raise ValueError(
            f"{len(given)} tokens came back that are not the {len(forced)} forced ones"
        )
    states = answer["meta_info"].get("hidden_states") or []
    # A server that prefills too puts the states of the whole prompt before them, as one entry.
    steps = [state for state in states if not isinstance(state[0], list)]
    if len(steps) < len(forced) - 1:
        raise ValueError(f"{len(steps)} hidden states for {len(forced) - 1} decode steps")
    return torch.tensor(steps[len(steps) - (len(forced) - 1) :], dtype=torch.float32)


def output_embedding(model_path: str) -> torch.Tensor:
    """[V, d] float32, from the model's folder."""
    from safetensors import safe_open

    for path in sorted(Path(model_path).glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            for name in ("lm_head.weight", "model.embed_tokens.weight"):
                if name in file.keys():  # noqa: SIM118  (not a dict)
                    return torch.as_tensor(file.get_tensor(name)).float()
    raise ValueError(f"{model_path}: no lm_head.weight or model.embed_tokens.weight")


def token_nats(
    hidden: torch.Tensor, targets: torch.Tensor, embedding: torch.Tensor
) -> torch.Tensor:
    """-log p of ``targets`` [T] given ``hidden`` [T, d]; float32 [T]."""
    logs = torch.log_softmax(hidden @ embedding.T, dim=-1)
    return -logs[torch.arange(len(targets)), targets]


def reference_nats(model_path: str, text: tasks.Document, forced_tokens: int) -> torch.Tensor:
    """The same from one forward pass of transformers over the whole text, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokens = torch.from_numpy(text.tokens)
    with torch.no_grad():
        hidden = model.model(tokens[None]).last_hidden_state[0]
    targets = tokens[-forced_tokens + 1 :]
    return token_nats(hidden[-forced_tokens:-1], targets, output_embedding(model_path))


def part(nats: Sequence[torch.Tensor]) -> Row:
    """Of one tensor for each text; tokens weigh the same, whichever text they are in."""
    every = torch.cat(list(nats)).double()
    return {
        "tokens": len(every),
        "nats": round(float(every.mean()), 6),
        "perplexity": round(math.exp(float(every.mean())), 5),
        "nats_by_text": [round(float(x.double().mean()), 6) for x in nats],
        "tokens_by_text": [len(x) for x in nats],
    }


def measure(
    fleet: Fleet, setting: Setting, texts: Sequence[tasks.Document], args: argparse.Namespace
) -> Row:
    embedding = output_embedding(args.model_path)
    payloads = [forced_payload(text, args.forced) for text in texts]
    before, begin = fleet.counters(setting), time.monotonic()
    answers = [fleet.ask(setting, payload) for payload in payloads]
    seconds = time.monotonic() - begin
    answer_nats, other_nats, gaps = [], [], []
    for text, given in zip(texts, answers, strict=True):
        tokens = torch.from_numpy(text.tokens)
        hidden = hidden_of_steps(given, tokens[-args.forced :].tolist())
        nats = torch.full(tokens.shape, torch.nan)
        nats[-args.forced + 1 :] = token_nats(hidden, tokens[-args.forced + 1 :], embedding)
        in_answers, others = counted_tokens(text, args.forced)
        answer_nats.append(nats[in_answers])
        other_nats.append(nats[others])
        if args.check and setting.policy == FULL:
            reference = reference_nats(args.model_path, text, args.forced)
            gaps.append(float((reference - nats[-args.forced + 1 :]).abs().max()))
    return {
        "answer": part(answer_nats),
        "other": part(other_nats),
        "seconds": round(seconds, 2),
        "cpu_compute_ratio": cpu_ratio(before, fleet.counters(setting)),
        **({"reference_gap_nats": max(gaps)} if gaps else {}),
    }


def run(args: argparse.Namespace, file: RowFile, progress: Progress) -> None:
    texts = [make_text(args.length, args.forced, args.seed, i) for i in range(args.texts)]
    settings = [s for s in grid(args.policies, args.budgets) if not file.has(**key_of(s))]
    for group in groups_of(settings, args.at_once):
        progress.say(f"starting servers for {', '.join(s.name for s in group)}")
        with Fleet(
            args.model_path,
            group,
            dtype=args.dtype,
            longest_tokens=args.length + 64,
            server_flags=(*FORCING_FLAGS, "--enable-return-hidden-states"),
            environment={"OMP_NUM_THREADS": str(args.threads), **FORCING_ENVIRONMENT},
            config=args.config,
        ) as fleet:
            with ThreadPoolExecutor(len(group)) as pool:
                found = list(pool.map(lambda s: measure(fleet, s, texts, args), group))
            for setting, fields in zip(group, found, strict=True):
                row = file.add(setting.policy, **key_of(setting), **fields)
                progress.say(
                    f"{setting.name}: answers {row['answer']['perplexity']:.4f}, others "
                    f"{row['other']['perplexity']:.3f}, {row['seconds']:.0f} s"
                )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--policies", nargs="+", choices=NAMES, default=[FULL, "scout"])
    add("--budgets", nargs="+", type=int, default=[512, 1024, 2048], metavar="TOKENS")
    add("--texts", type=int, default=8)
    add("--length", type=int, default=4096, metavar="TOKENS")
    add("--forced", type=int, default=384, metavar="TOKENS", help="at the end of each text")
    add("--at-once", type=int, default=4, metavar="SERVERS", help="settings started together")
    add("--check", action="store_true", help="compare full with a forward pass by transformers")
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    args.through = "decode"
    complete(args, "tasks")
    sizes = {"length_tokens": args.length, "forced_tokens": args.forced, "texts": args.texts}
    fields = {**shared_fields(args), **sizes}
    file = RowFile(args.json, environment(BENCHMARK, PACKAGES), fields, ("policy", "budget_tokens"))
    with ends_orderly():
        run(args, file, Progress())
    return 0


if __name__ == "__main__":
    sys.exit(main())
