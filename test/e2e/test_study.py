"""A scout server and the selection study agree on a real model: selected pages and log-probabilities.

The pages are recorded by an SGLang plugin that wraps the engine's selection.
"""

import json
from pathlib import Path

import pytest
import torch

from benchmark.accuracy import planted
from benchmark.accuracy.study.decode import Text, decode_window
from benchmark.accuracy.study.model import Model
from benchmark.accuracy.study.run import real_documents
from benchmark.accuracy.study.selection import Setting
from harness import PDCluster
from servers.pd_cluster import flags
from servers.sglang_http import generate_payload

PROMPT_TOKENS, STEPS = planted.CUTS[0], 8
# Settings of the server, and of the study. Without pre-computation every query is the real one. With it, and without a
# hint, a request's first step has only the first and the newest page on the device: predicted queries attend to all
# other selected pages.
CASES = {
    "decode": ({"precompute": False}, Setting(512, "rotated-2", reduce="value"), STEPS),
    "ahead": (
        {"recall": "off"},
        Setting(512, "rotated-2", reduce="value", query="predicted", attends="reweighed"),
        1,
    ),
}
RECORDER = """
import json, os

def register():
    from sglang_scout.engine import step

    select = step.select_pages

    def recorded(scores, table, *rest, **more):
        selection = select(scores, table, *rest, **more)
        column = {page: i for i, page in enumerate(table[0].tolist())}
        pages = [column[page] for page in selection.pages[0].tolist() if page >= 0]
        with open(f"{os.environ['SELECTIONS']}.{os.getppid()}", "a") as file:
            file.write(json.dumps(pages) + "\\n")
        return selection

    step.select_pages = recorded
"""


@pytest.fixture
def recorder(tmp_path):
    """Environment that makes servers record their selections, one file per server."""
    info = tmp_path / "selections-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: selections\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nselections = selections:register\n"
    )
    (tmp_path / "selections.py").write_text(RECORDER)
    return {"PYTHONPATH": str(tmp_path), "SELECTIONS": str(tmp_path / "chosen")}


@pytest.mark.slow  # four minutes
def test_first_steps_are_the_studys(model_path, recorder):
    ((_, document),) = real_documents(model_path, range(1, 2))
    prompt = document.tokens[:PROMPT_TOKENS]

    def decode_flags(name):
        config = json.dumps(CASES[name][0])
        return flags(kv_offload_budget=512, kv_offload_config=config)

    first, *others = CASES
    with PDCluster(
        model_path,
        router=False,
        server_args=flags(kv_offload="scout"),
        prefill_args=flags(
            chunked_prefill_size=-1,
            max_prefill_tokens=2 * PROMPT_TOKENS,
            kv_offload_config='{"prefill_digests": false}',  # and no hints
        ),  # fmt: skip
        decode_args=decode_flags(first),
        more_decodes={name: decode_flags(name) for name in others},
        max_running_requests=2,
        max_total_tokens=4 * PROMPT_TOKENS,
        env=recorder,
    ) as cluster:
        payload = generate_payload(prompt, STEPS + 1, logprobs=True)
        answers = {name: cluster.ask_pair(payload, name) for name in CASES}
        states = {name: cluster.kv_offload(name) for name in CASES}
        pids = {name: cluster.servers[name].pid for name in CASES}

    model = Model(model_path)
    with torch.no_grad():
        text = Text(model, torch.tensor(prompt))
        for name, (_, setting, steps) in CASES.items():
            ids = torch.tensor(answers[name]["output_ids"])
            assert len(ids) == STEPS + 1 and states[name]["cpu_pages"] > 0
            window = decode_window(
                model, text, PROMPT_TOKENS, ids[:steps], setting, keep_chosen=True
            )
            # One line per layer of a step; SGLang's warm-up request has fewer pages.
            lines = Path(f"{recorder['SELECTIONS']}.{pids[name]}").read_text().splitlines()
            layers = model.config.layers
            chosen = [pages for pages in map(set, map(json.loads, lines)) if len(pages) == 16]
            same = 0
            for i in range(steps * layers):
                step, layer = divmod(i, layers)
                expected = set(window.chosen[layer][0, step].nonzero().ravel().tolist())
                assert len(expected) == len(chosen[i]) == 16
                # Digests are packed there, which resolves near-ties differently.
                assert len(expected - chosen[i]) <= 1, f"step {step}, layer {layer}: not a near-tie"
                same += expected == chosen[i]
            assert same >= 0.9 * steps * layers, f"{name}: {same} of {steps * layers} selections"
            found = [x[0] for x in answers[name]["meta_info"]["output_token_logprobs"]]
            torch.testing.assert_close(
                window.log_probs[range(steps), ids[1 : steps + 1]],
                torch.tensor(found[1 : steps + 1]),
                atol=3e-2,  # of such near-ties
                rtol=0,
            )
