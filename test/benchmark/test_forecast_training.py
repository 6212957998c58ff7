"""Training of page selection: the loss against loops over its equations, initial weights, refusals."""

from __future__ import annotations

import math

import pytest
import torch

import train_forecast
from benchmark.accuracy.forecast_training import loss
from benchmark.accuracy.forecast_training.trainer import Plan, Trainer, first_forecast, train
from benchmark.accuracy.study.model import Model
from page_weights import forecast_weights, identity
from sglang_scout.core.forecast import VERSION, check_weights, load_weights, save_weights

TOKENS, SIZES = 320, {"layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 32}
PLAN = Plan("forecast", steps=4, tokens=TOKENS, texts=2, lr=3e-3, rank=16, top_pages=2, seed=5)
KINDS = pytest.mark.parametrize("kind", ["forecast", "pilot"])


def text(index):
    return torch.randint(0, 500, (TOKENS,), generator=torch.Generator().manual_seed(index))


def trainer(folder, kind="forecast", **changes):
    plan = Plan(**(PLAN.__dict__ | {"kind": kind} | changes))
    return Trainer(Model(folder), train_forecast.identity_of(folder), plan, text)


def literal_target(q, k, t):
    """Equation 12 for one KV head and the query ``q`` [G, D] at position ``t``, pooled to the pages of ``k`` [T, D]."""
    pages, heads = [0.0] * (len(k) // 32), [0.0] * t
    for of_head in q:
        fine = [float(of_head @ (k[j] + k[j + 1]) / 2) / math.sqrt(len(k[0])) for j in range(t)]
        total = sum(math.exp(x) for x in fine)
        heads = [sum_ + math.exp(x) / total for sum_, x in zip(heads, fine, strict=True)]
    for j, x in enumerate(heads):
        pages[j // 32] = max(pages[j // 32], x)
    return pages


def literal_kl(target, logit, t, top):
    """Equations 13 and 14 for one head and query; ``logit`` of a page is a tensor."""
    offered = range(1, t // 32 - 1)  # neither the first page nor the newest full one
    predicted = torch.stack([logit(n) for n in offered]).softmax(0)
    best = sorted(offered, key=lambda n: -target[n])[:top]
    entries = [(target[n], predicted[n - 1]) for n in best]
    rest = [n for n in offered if n not in best]
    if rest:
        entries.append((sum(target[n] for n in rest), sum(predicted[n - 1] for n in rest)))
    total = sum(p for p, _ in entries)
    return sum(p / total * (math.log(p / total) - torch.log(q)) for p, q in entries)


@KINDS
@pytest.mark.parametrize("top", [2, 20])
def test_loss_and_gradient_are_those_of_the_equations(kind, top):
    """``top`` 20: more than there are pages, so no query has a lumped entry."""
    draw = torch.Generator().manual_seed(3)
    H, G, D, T, r = 2, 3, 8, 256, 5
    position = torch.tensor([130, 191, 192, 255])
    k = torch.randn(H, T, D, generator=draw, dtype=torch.double)
    q = torch.randn(len(position), H * G, D, generator=draw, dtype=torch.double)
    shapes = [(H, len(position), D)] if kind == "forecast" else [(H, r, 2 * D), (H, r, G * D)]
    learned = [torch.randn(*x, generator=draw, dtype=torch.double).requires_grad_() for x in shapes]
    of_pages = k.unflatten(1, (-1, 32)).transpose(0, 1)  # [N, H, 32, D]
    targets = loss.page_targets(q, k, position)
    grouped = q.unflatten(1, (H, G))
    if kind == "forecast":
        halves = of_pages.unflatten(2, (2, 16)).mean(3)
        found = loss.mean_scores(learned[0][None], halves[None])
    else:
        extreme = of_pages.gather(2, of_pages.abs().argmax(2, keepdim=True))[:, :, 0]
        pool = torch.cat([of_pages.mean(2), extreme], -1)
        queries = grouped.flatten(2).transpose(0, 1)
        found = loss.pilot_scores(learned[1][None], queries[None], learned[0][None], pool[None])
    offered = loss.offered_pages(position, T // 32)
    kl = loss.restricted_kl(targets[None], found * D**-0.5, offered, top)
    expected = []
    for h in range(H):
        for i, t in enumerate(position.tolist()):
            target = literal_target(grouped[i, h], k[h], t)
            torch.testing.assert_close(
                targets[h, i, : t // 32], torch.tensor(target[: t // 32], dtype=torch.double)
            )

            def logit(n, h=h, i=i):
                if kind == "forecast":
                    windows = [k[h, a : a + 32].mean(0) for a in (32 * n, 32 * n + 16)]
                    return max(learned[0][h, i] @ w for w in windows) / D**0.5
                of_query = learned[1][h] @ grouped[i, h].flatten()
                return (of_query @ (learned[0][h] @ pool[n, h])) / D**0.5

            expected.append(literal_kl(target, logit, t, top))
    expected = torch.stack(expected).view(1, H, -1)
    torch.testing.assert_close(kl, expected)
    both = (torch.autograd.grad(x.sum(), learned) for x in (kl, expected))
    for got, wanted in zip(*both, strict=True):
        torch.testing.assert_close(got, wanted)
        assert got.isfinite().all() and got.any()


def test_a_forecast_begins_as_the_query_of_the_next_layer(tiny_model):
    """Exactly, if a KV head has one query head and the model no head norm."""
    model = Model(tiny_model("llama", **SIZES | {"kv_heads": 4}))
    position, inputs = torch.arange(TOKENS), []
    model.prefill(text(0), lambda layer, x, q, k: inputs.append(x))
    for layer, w in enumerate(first_forecast(model)["w"]):
        x = inputs[max(layer - 1, 0)]
        made = model.normed(max(layer - 1, 0), x) @ w.T
        made = model.rope(made.unflatten(-1, (4, -1)), position)
        torch.testing.assert_close(made, model.query(layer, x, position), rtol=1e-4, atol=1e-4)


@KINDS
def test_training_is_reproducible_and_writes_a_file_of_its_model(tiny_model, tmp_path, kind):
    folder, out = tiny_model("qwen3", **SIZES), tmp_path / "w.npz"
    whole = trainer(folder, kind)
    losses = [whole.train_step() for _ in range(PLAN.steps)]
    assert losses[2:] != losses[:2] and all(map(math.isfinite, losses))
    train(trainer(folder, kind), out)
    found = load_weights(str(out), kind)
    check_weights(found, identity=whole.identity, hidden_size=32, model="m")
    for name, x in whole.weights.items():
        assert torch.equal(torch.from_numpy(found.arrays[name]), x.detach())
    assert found.header.version == VERSION and '"seed": 5' in found.header.made_by


def test_an_output_of_another_model_or_kind_is_not_overwritten(tiny_model, tmp_path, capsys):
    folder, out = tiny_model("llama", **SIZES), tmp_path / "w.npz"
    own = train_forecast.identity_of(folder)
    arguments = ["--model", str(folder), "--out", str(out)]
    for made, kind, says in (
        (forecast_weights(identity()), "forecast", "is there, of LlamaForCausalLM with 3 layers"),
        (forecast_weights(own), "pilot", "holds forecast weights, expected pilot"),
    ):
        save_weights(made, str(out))
        assert train_forecast.main([*arguments, "--kind", kind]) == 1
        assert says in capsys.readouterr().err
    assert train_forecast.main(arguments) == 0
    assert capsys.readouterr().out == f"{out}\n"


@pytest.mark.parametrize("rank", [4, 17])
def test_a_rank_that_no_server_takes_is_refused_before_training(tiny_model, rank):
    message = f"a rank of {rank}: expected one from 8 to the head size, 16"
    with pytest.raises(ValueError, match=message):
        trainer(tiny_model("llama", **SIZES), "pilot", rank=rank)
