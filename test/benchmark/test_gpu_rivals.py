"""The rival rows without a device: what they hand to FlashInfer, and that its failure is a row."""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmark import rows
from benchmark.kernels import gpu_baselines as gpu_rivals
from benchmark.kernels import gpu_kernels


class PlainWrapper:
    """What FlashInfer documents of its paged decode, in plain torch: packed pages, base 2."""

    log = staticmethod(torch.log2)

    def __init__(self, workspace, layout, use_tensor_cores):
        assert workspace.dtype == torch.uint8 and layout == "NHD" and use_tensor_cores

    def plan(self, indptr, indices, last_page_len, HQ, H, D, page, *, q_data_type, kv_data_type,
             sm_scale):  # fmt: skip
        assert (q_data_type, kv_data_type) == (torch.bfloat16, torch.bfloat16)
        assert indptr.device.type == "cpu" and (indices >= 0).all()
        assert len(indices) == indptr[-1]
        self.given = indptr.tolist(), indices.long(), last_page_len.tolist(), HQ // H, sm_scale

    def run(self, q, cache, *, out, lse, return_lse):
        indptr, indices, last, group, scale = self.given
        for b in range(len(q)):
            pages = indices[indptr[b] : indptr[b + 1]]
            k, v = (x[pages].flatten(0, 1)[: (len(pages) - 1) * x.shape[1] + last[b]].float()
                    for x in cache)  # fmt: skip
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            s = torch.einsum("hd,thd->ht", q[b].float(), k) * scale
            weight = s.exp().sum(1)
            lse[b] = self.log(weight)
            out[b] = torch.einsum("ht,thd->hd", s.exp() / weight[:, None], v)
        return out, lse


class NaturalWrapper(PlainWrapper):
    log = staticmethod(torch.log)


def plain_top_k(scores, table, lengths, k, *, deterministic):
    return torch.stack(
        [t[s[:n].topk(k).indices] for s, t, n in zip(scores, table, lengths, strict=True)]
    )


@pytest.fixture
def pools():
    return gpu_kernels.Pools("cpu", pages=64)


def use(monkeypatch, wrapper=PlainWrapper, top_k=plain_top_k):
    stand_in = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=wrapper, top_k_page_table_transform=top_k
    )
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setattr(gpu_rivals, "WORKSPACE_BYTES", 16)


def test_flashinfer_gets_what_our_kernels_attend_to(monkeypatch, pools):
    use(monkeypatch)
    case = gpu_rivals.attention(pools, 2, 3)
    assert case.check() == ""
    assert len(case.calls) == gpu_kernels.REPEATS


def test_a_natural_logarithm_would_be_noticed(monkeypatch, pools):
    use(monkeypatch, NaturalWrapper)
    assert "elements differ" in gpu_rivals.attention(pools, 2, 3).check()


def test_flashinfers_top_k_is_compared_page_by_page(monkeypatch, pools):
    use(monkeypatch)
    assert gpu_rivals.selection(pools, 2, 40, 8).check() == ""
    use(monkeypatch, top_k=lambda *a, **k: plain_top_k(*a, **k).roll(1, 0))
    assert gpu_rivals.selection(pools, 2, 40, 8).check() == "other pages than the reference"


def test_the_installed_flashinfer_takes_these_arguments():
    flashinfer = pytest.importorskip("flashinfer")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    inspect.signature(wrapper).bind(0, "NHD", use_tensor_cores=True)
    plan = inspect.signature(wrapper.plan).bind(
        *range(8), q_data_type=0, kv_data_type=0, sm_scale=0
    )
    names = ["indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim"]
    assert list(plan.arguments)[1:8] == [*names, "page_size"]
    inspect.signature(wrapper.run).bind(0, 1, 2, out=0, lse=0, return_lse=True)
    inspect.signature(flashinfer.top_k_page_table_transform).bind(*range(4), deterministic=True)


def uncompiled():
    raise OSError("no nvcc")


@pytest.mark.parametrize(
    ("installed", "status", "reason"),
    [
        (False, "absent", "flashinfer is not installed"),
        (True, "failed", "OSError: no nvcc"),
    ],
)
def test_what_cannot_be_measured_is_a_row_with_a_reason(monkeypatch, installed, status, reason):
    monkeypatch.setattr(gpu_rivals.importlib.util, "find_spec", lambda name: installed or None)
    writer = rows.Writer(None, rows.environment("test"))
    like = gpu_kernels.Case("attend_pages", {"B": 1}, 1, [], str)
    gpu_rivals.add_rival(writer, None, {}, like, uncompiled)
    (row,) = writer.rows
    assert (row["impl"], row["op"], row["B"]) == ("flashinfer", "attend_pages", 1)
    assert (row["status"], row["reason"]) == (status, reason)


def test_what_differs_from_the_reference_is_not_timed(monkeypatch, pools):
    use(monkeypatch, NaturalWrapper)
    writer = rows.Writer(None, rows.environment("test"))
    monkeypatch.setattr(gpu_rivals.importlib.util, "find_spec", lambda name: True)
    like = gpu_kernels.Case("attend_pages", {"B": 2}, 1, [], str)
    gpu_rivals.add_rival(writer, None, {}, like, lambda: gpu_rivals.attention(pools, 2, 3))
    assert writer.rows[0]["status"] == "failed" and "differ" in writer.rows[0]["reason"]
