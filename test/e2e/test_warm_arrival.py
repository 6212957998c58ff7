"""A long request starts warm, with the pages of the prefill server's hint."""

import json

import pytest

from benchmark.accuracy import planted
from benchmark.accuracy.study.run import real_documents
from harness import PDCluster, wait_until
from servers.pd_cluster import flags
from servers.sglang_http import generate_payload

BUDGET_PAGES, STEPS = 8, 20


@pytest.mark.slow  # three minutes
def test_the_first_step_finds_most_of_its_pages_on_the_device(model_path, tmp_path):
    """Without a hint (with different digests only K and V are sent) it finds two per layer."""
    ((_, document),) = real_documents(model_path, range(1, 2))
    prompt = document.tokens[: planted.CUTS[0]]
    logs = {name: tmp_path / f"{name}.jsonl" for name in ("decode", "other")}

    def decode_flags(name):
        config = {"recall": "off", "step_log": str(logs[name])}
        if name == "other":
            config["digest"] = "minmax"
        return flags(kv_offload_budget=32 * BUDGET_PAGES, kv_offload_config=json.dumps(config))

    def steps(name):
        return [json.loads(line) for line in logs[name].read_text().splitlines()[1:]]

    with PDCluster(
        model_path,
        router=False,
        server_args=flags(kv_offload="scout"),
        decode_args=decode_flags("decode"),
        more_decodes={"other": decode_flags("other")},
        max_running_requests=4,
        max_total_tokens=4 * len(prompt),
    ) as cluster:
        for name in logs:
            assert (
                len(cluster.ask_pair(generate_payload(prompt, STEPS), name)["output_ids"]) == STEPS
            )
        wait_until("steps are logged", lambda: all(len(steps(name)) > 16 for name in logs), 30)

    pages = {}
    for name in logs:
        long = [x for x in steps(name) if max(x["full_pages"]) > BUDGET_PAGES]
        first = next(x for x in long if x["ages"] == [0])
        pages[name] = sum(map(sum, first["cpu_pages"]))
        layers = len(first["cpu_pages"])
    assert pages["other"] == (BUDGET_PAGES - 2) * layers, "all but the first and the newest page"
    assert pages["decode"] < pages["other"] / 2, pages
