"""The selection study without servers: its model, its digests and its attention against plain references."""

from __future__ import annotations

import json

import pytest
import torch

from benchmark.accuracy import planted, tasks
from benchmark.accuracy.questions import SOURCES
from benchmark.accuracy.study import run, table
from benchmark.accuracy.study.decode import Text, decode_window
from benchmark.accuracy.study.model import Model
from benchmark.accuracy.study.residents import Residents
from benchmark.accuracy.study.selection import Setting
from benchmark.accuracy.study.settings import OF_SYSTEMS
from sglang_scout.engine import RESULT_DELAY_STEPS

LENGTH, START = 640, 512


def tokens_of(seed: int = 0, count: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 500, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def decoder(tiny_model):
    model = Model(tiny_model("qwen3"))
    tokens = tokens_of()
    return model, Text(model, tokens), tokens


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_log_probs_are_those_of_transformers(tiny_model, arch):
    from transformers import AutoModelForCausalLM

    folder, tokens = tiny_model(arch), tokens_of(1, 300)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens[None])
    model = Model(folder)
    _, last = model.prefill(tokens)
    torch.testing.assert_close(
        model.log_probs(last), expected.logits[0].log_softmax(-1), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("setting", [Setting(), Setting(LENGTH)])
def test_a_budget_that_covers_the_text_is_full_attention(decoder, setting):
    model, text, tokens = decoder
    window = decode_window(model, text, START, tokens[START:], setting)
    torch.testing.assert_close(
        window.log_probs, model.log_probs(text.last[START:]), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(window.mass, torch.ones(model.config.layers))


def token_by_token(model, text, tokens, setting, chosen):
    """The same window, one token at a time, attending to a list of tokens: the oracle of `decode_window`."""
    kv = [(k[:, :START], v[:, :START]) for k, v in text.kv]
    group = model.config.q_heads // model.config.kv_heads
    rows = []
    for i, token in enumerate(tokens):
        at = torch.tensor([START + i])
        x, before = model.embed(token[None]), None
        for layer in range(model.config.layers):
            q = model.query(layer, x, at)[0]
            is_real = before is None or setting.query == "real"
            ahead = q if is_real else model.query(layer, before, at)[0]
            k, v = model.keys_values(layer, x, at)
            kv[layer] = tuple(torch.cat([a, b], 1) for a, b in zip(kv[layer], (k, v), strict=True))
            keys, values = kv[layer]
            full = int(at) // 32
            pages, before_it = (
                chosen[layer][0, j].nonzero().ravel().tolist() for j in (i, max(i - 1, 0))
            )
            out = torch.zeros_like(q)
            for head in range(len(q)):
                logits, seen, remote = [], [], []
                for page in [*pages, full]:
                    place = torch.arange(page * 32, min(page * 32 + 32, int(at) + 1))
                    own = keys[head // group, place]
                    part = own @ q[head] * model.scale
                    far = page not in (0, full - 1, full) and setting.attends != "real"
                    if far and page not in before_it:
                        remote.append((len(logits), part))
                        part = own @ ahead[head] * model.scale
                    logits.append(part)
                    seen.append(values[head // group, place])
                if remote and setting.attends.startswith("reweighed"):
                    # With the keys themselves as digest, the joint mass is corrected to the true one.
                    true = torch.cat([x for _, x in remote]).logsumexp(0)
                    correct = true - torch.cat([logits[n] for n, _ in remote]).logsumexp(0)
                    for n, _ in remote:
                        logits[n] = logits[n] + correct
                out[head] = torch.cat(logits).softmax(0) @ torch.cat(seen)
            before, x = x, model.after_attention(layer, x, out[None])
        rows.append(model.log_probs(x)[0])
    return torch.stack(rows)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(128, "keys"),
        Setting(96, "rotated-2"),
        Setting(128, "keys", query="predicted"),
        *(
            Setting(128, "keys", query="predicted", attends=x)
            for x in ("predicted-missing", "reweighed-missing")
        ),
    ],
    ids=lambda setting: setting.name,
)
def test_a_window_is_what_decoding_token_by_token_gives(decoder, setting):
    model, text, tokens = decoder
    window = decode_window(
        model, text, START, tokens[START : START + 70], setting, keep_chosen=True
    )
    expected = token_by_token(model, text, tokens[START : START + 70], setting, window.chosen)
    torch.testing.assert_close(window.log_probs, expected, atol=2e-4, rtol=1e-4)
    for chosen in window.chosen:
        full = torch.arange(START, START + 70) // 32
        assert (chosen.sum(-1)[0] == setting.budget_tokens // 32).all()
        rows = torch.arange(70)
        assert chosen[0, :, 0].all() and chosen[0, rows, full - 1].all()
        assert not (chosen[0] & (torch.arange(chosen.shape[-1]) >= full[:, None])).any()


def test_all_that_the_device_cache_holds_is_attended_to(decoder):
    model, text, tokens = decoder
    setting, few = Setting(64, "keys", cache_tokens=256), tokens[START : START + 40]
    window = decode_window(model, text, START, few, setting, keep_chosen=True)
    expected = token_by_token(model, text, few, setting, window.chosen)
    torch.testing.assert_close(window.log_probs, expected, atol=2e-4, rtol=1e-4)
    assert (window.chosen[0].sum(-1) > 2).any()
    assert (window.resident_mass <= window.mass + 1e-6).all() and (window.resident_mass > 0).all()


def test_a_device_cache_gets_pages_one_step_after_their_selection_is_known():
    """RheoServe's: promotion takes free slots at once, an exchange those of less important pages at its turn."""
    text_pages, cache, budget = 40, 7, 4
    for layer, room in ((0, 3), (5, 0)):
        residents = Residents(layer, 32, text_pages, cache + room, budget)
        at = 30 * 32 + torch.arange(32)
        chosen = torch.zeros(2, 32, text_pages, dtype=torch.bool)
        chosen[:, :, [0, 29]] = True
        chosen[0, 4:, 7] = True
        chosen[1, :, 24:27] = True
        held = residents.follow(chosen, at)
        assert held[:, [0, 29]].all() and (held.sum(-1) <= cache + room + 1).all()
        assert held[0].nonzero().ravel().tolist() == [0, 26, 27, 28, 29]
        got = int(held[:, 7].nonzero()[0])
        if room:
            assert got == 4 + RESULT_DELAY_STEPS + 1
        else:  # after the step of the layer's turn, one in 16; that of the first token is layer + 1
            assert got == 16 - layer


def test_pages_stay_on_the_device_after_the_tokens_that_selected_them(decoder):
    model, text, tokens = decoder
    rows, shares = torch.arange(70), []  # more than a block
    for steps in (1, 3):
        how = {"attends": "reweighed-missing", "resident_steps": steps}
        setting = Setting(128, "keys", query="predicted", **how)
        window = decode_window(model, text, START, tokens[START:][:70], setting, keep_chosen=True)
        for chosen, share, changes in zip(window.chosen, window.cpu, window.changes, strict=True):
            remote = chosen[0].clone()
            remote[:, 0] = remote[rows, (START + rows) // 32 - 1] = False
            for back in range(1, steps + 1):
                remote &= ~chosen[0, (rows - back).clamp(min=0)]
            assert float(share) == pytest.approx(float(remote.sum() / chosen.sum()))
            weight, size, error, product, square = changes.tolist()
            assert 0 < weight < int(remote.any(-1).sum()) * model.config.q_heads
            # The keys themselves estimate the change of mass exactly. Layer 0 has its real query.
            assert error < 1e-3 and product == pytest.approx(square, abs=1e-3)
            assert size >= error
        shares.append(window.cpu.mean())
    assert shares[1] < shares[0]


def test_prefilled_tokens_attend_to_everything(decoder):
    model, text, tokens = decoder
    setting = Setting(96, query="predicted", attends="reweighed-missing")
    log_probs = decode_window(model, text, START, tokens[START:], setting, prefilled=10).log_probs
    full = model.log_probs(text.last[START:])
    torch.testing.assert_close(log_probs[:10], full[:10], atol=1e-4, rtol=1e-4)
    assert ((log_probs - full)[10:].abs().amax(-1) > 0.01).all()


def short_documents(model_path, numbers):
    """Questions about the retrieval model's texts, cut to whole pages: no network is needed."""
    for index in numbers:
        task = ("recall", "needle", "copy")[index % 3]
        sample = tasks.make_sample(task, 512, 70_000 + index)
        ask, answer = sample.prompt[448:], list(sample.answer)
        question = planted.Question(task, 448, ask, answer, [(0, len(answer))])
        yield index, planted.Document(task, sample.prompt[:480], [question])


def test_the_command_resumes_and_its_rows_make_tables(tmp_path, capsys, monkeypatch):
    settings = {"facts": [Setting(256, "keys"), Setting(64)], "text": [Setting(64)]}
    monkeypatch.setitem(run.SETS, "main", settings)
    monkeypatch.setattr(planted, "CUTS", (448,))
    monkeypatch.setattr(planted, "WINDOW_TOKENS", 32)
    monkeypatch.setattr(run, "real_documents", short_documents)
    path, model = tmp_path / "study.jsonl", SOURCES["tasks"].model()
    command = ["--model-path", str(model), "--json", str(path)]
    assert run.main([*command, "--documents", "3"]) == 0
    assert run.main([*command, "--documents", "6"]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == len({(r["setting"], r["document"], r["part"]) for r in rows}) == 18
    by_setting = table.paired(rows, "facts")
    assert list(by_setting) == ["minmax-32 64", "keys 256"]
    lost = [table.points_lost(by_setting[name]) for name in ("keys 256", "minmax-32 64")]
    assert lost[0] <= lost[1]
    low, high = table.interval(by_setting["minmax-32 64"], table.points_lost)
    assert low <= lost[1] <= high
    assert table.main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "| full attention |" in shown and "facts, 6 documents" in shown
    assert "text, 6 documents" in shown and "| minmax-32 64 | 186 |" in shown


def test_tables_of_systems_leave_out_what_has_not_run():
    place = {"document": 0, "cut": [2048, 4096], "mass": [0.5, 0.75], "resident_mass": [0.25, 0.5]}
    of_text = {"tokens": [10, 30], "nats": [2.0, 3.0], "full_nats": [1.0, 2.5]}
    of_text |= {"kl": [0.5, 0.5], "agree": [1.0, 0.5]}
    rows = []
    for setting in [x for x in OF_SYSTEMS if x.cache_tokens == 1024 == x.budget_tokens]:
        shared = {**place, "setting": setting.name, "budget_tokens": 1024}
        rows += [
            shared | {"part": "text"} | of_text,
            shared | {"part": "facts", "right": [[1], [0]]},
        ]
    lines = table.systems_table(rows).splitlines()
    found = "1,024 | 1/2 | – | 0.625 | 0.500 | 0.625 | 0.625 | 0.375 |"
    assert [x for x in lines if "1/2" in x] == [f"| `rheo`, cache of one budget | {found}"]
