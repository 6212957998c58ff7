"""The CPU's part, computed with the predicted query, is merged with the weight of the real one."""

import json

import torch

from sglang_scout.engine.verify import co_attention_reference


def test_missing_pages_weigh_as_the_real_query_says(make):
    """By the digests' estimates: the output is closer to that with the exact masses."""
    config = {"digest": "rotated-2", "recall": "off"}
    worker = make(budget_tokens=320, drift=2.0, config=json.dumps(config))
    worker.admit(700)
    shape, host, gaps = worker.shape, worker.host, {False: 0.0, True: 0.0}
    for _ in range(6):
        worker.step()
        batch = worker.engine._results.running.batch
        for layer in (1, 2):
            chosen, missing = (x[0][x[0] >= 0].long() for x in worker.engine._results.of(layer, 1))
            assert len(missing)
            here = [page for page in chosen.tolist() if page not in missing]
            tail = batch.tail_page[0], slice(int(batch.tail_len[0]))
            device = [
                torch.cat([x[layer][here].flatten(0, 1), x[layer][tail]]) for x in (host.k, host.v)
            ]
            cpu = [x[layer][missing].flatten(0, 1) for x in (host.k, host.v)]
            queries = worker.queries[layer][0].float(), worker.missing.queries[layer][0]
            keys = cpu[0].float().repeat_interleave(queries[0].shape[0] // cpu[0].shape[1], 1)
            logits = [torch.einsum("hd,thd->ht", q, keys) * shape.scale for q in queries]
            real, ahead = (x.logsumexp(-1) for x in logits)
            for exact in gaps:
                change = real - ahead if exact else None
                expected = co_attention_reference(*queries, *device, *cpu, shape.scale, change)
                gaps[exact] += float((worker.outputs[layer][0] - expected).abs().mean())
    assert gaps[True] < 0.7 * gaps[False]
