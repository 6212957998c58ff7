"""The CPU's part, computed with the predicted query, is merged with the weight of the real one."""

import json

import pytest
import torch

from sglang_scout.engine.verify import co_attention_reference


@pytest.mark.parametrize("digest", ["minmax", "rotated-2"])
def test_missing_pages_weigh_as_the_real_query_says(make, digest):
    """By the digests' estimates: the output is closer to that with the exact masses."""
    config = {"digest": digest, "recall": "off"}
    worker = make(budget_tokens=320, drift=2.0, config=json.dumps(config))
    worker.admit(700)
    shape, gaps = worker.shape, {False: 0.0, True: 0.0}
    for _ in range(6):
        worker.step()
        batch = worker.engine._results.running.batch
        for layer in (1, 2):
            chosen, missing = (x[0][x[0] >= 0].long() for x in worker.engine._results.of(layer, 1))
            assert len(missing)
            here = [*(p for p in chosen.tolist() if p not in missing)]
            tail = batch.tail_page[0], slice(int(batch.tail_len[0]))
            device, cpu = (
                [x[layer][pages].flatten(0, 1) for x in (worker.host.k, worker.host.v)]
                for pages in (here, missing)
            )
            device = [
                torch.cat([x, of[layer][tail]])
                for x, of in zip(device, (worker.host.k, worker.host.v), strict=True)
            ]
            queries = worker.queries[layer][0].float(), worker.missing.queries[layer][0]
            keys = cpu[0].float().repeat_interleave(queries[0].shape[0] // cpu[0].shape[1], 1)
            real, ahead = (
                (torch.einsum("hd,thd->ht", q, keys) * shape.scale).logsumexp(-1) for q in queries
            )
            for exact in gaps:
                change = real - ahead if exact else None
                expected = co_attention_reference(
                    *queries, device[0], device[1], cpu[0], cpu[1], shape.scale, change
                )
                gaps[exact] += float((worker.outputs[layer][0] - expected).abs().mean())
    if digest == "minmax":
        assert gaps[False] < 1e-5 < gaps[True]
    else:
        assert gaps[True] < 0.7 * gaps[False]
