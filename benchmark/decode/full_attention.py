"""Decode steps with all KV on the device: the baselines of co-attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmark import device
from benchmark.decode.model import PAGE, DummyModel, ModelSize
from sglang_scout.ops.attend import attend_pages

KINDS = ("flashinfer", "ours")
Attend = Callable[..., torch.Tensor]


class DeviceKV:
    """Random K and V in device memory, for as many requests of any length as it has pages for."""

    def __init__(self, size: ModelSize, pages: int, dtype: torch.dtype) -> None:
        self.size, self.num_pages, where = size, pages, device.device()
        shape = (size.layers, pages, PAGE, size.kv_heads, size.head_dim)
        self.k, self.v = (torch.empty(shape, dtype=dtype, device=where) for _ in range(2))
        for layer in (*self.k, *self.v):
            layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16, device=where))


class FullAttention:
    """A step of ``batch`` requests of ``context`` tokens with attention to all of them.

    Args:
        kind: "flashinfer", as in stock SGLang; "ours": the attention kernel of co-attention, given every page.
    Raises:
        ImportError: FlashInfer is not installed, or there is no CUDA device.
    """

    def __init__(
        self, kind: str, model: DummyModel, kv: DeviceKV, batch: int, context: int
    ) -> None:
        size, self.batch, self.context, self._kv = kv.size, batch, context, kv
        each, where = context // PAGE, kv.k.device
        self._table = torch.arange(batch * each, dtype=torch.int32, device=where).view(batch, each)
        attend = {"flashinfer": self._flashinfer, "ours": self._ours}[kind]()
        x = torch.randn(batch, size.hidden, device=where).to(model.norm.dtype)
        out = torch.empty_like(x)
        q = torch.randn(batch, size.q_heads, size.head_dim, device=where).to(x.dtype)
        self.step = device.captured(lambda: out.copy_(model.forward(x, lambda *_: None, attend)))
        self.attention = device.captured(
            lambda: [attend(layer, q, None, None) for layer in range(size.layers)]
        )

    @property
    def attention_bytes(self) -> int:
        """K and V that a step reads."""
        return 2 * self._table.numel() * self._kv.k[0, 0].nbytes * self._kv.size.layers

    def _ours(self) -> Attend:
        def attend(layer: int, q: torch.Tensor, *_: object) -> torch.Tensor:
            kv, scale = (self._kv.k[layer], self._kv.v[layer]), q.shape[-1] ** -0.5
            return attend_pages(q.contiguous(), *kv, self._table, None, None, scale)[0]

        return attend

    def _flashinfer(self) -> Attend:
        import flashinfer

        if device.device() == "cpu":
            raise ImportError("FlashInfer needs a CUDA device")
        size, pages = self._kv.size, self._table.flatten()
        work = torch.empty(256 * 2**20, dtype=torch.uint8, device=pages.device)
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=pages.device)
        starts *= self._table.shape[1]
        last = torch.full((self.batch,), PAGE, dtype=torch.int32, device=pages.device)
        buffers = {
            "paged_kv_indptr_buffer": starts.clone(),
            "paged_kv_indices_buffer": pages.clone(),
            "paged_kv_last_page_len_buffer": last.clone(),
        }
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            work, "NHD", use_cuda_graph=True, use_tensor_cores=True, **buffers
        )
        heads = size.q_heads, size.kv_heads, size.head_dim
        types = {"q_data_type": torch.bfloat16, "kv_data_type": self._kv.k.dtype}
        wrapper.plan(starts, pages, last, *heads, PAGE, **types)

        def attend(layer: int, q: torch.Tensor, *_: object) -> torch.Tensor:
            return wrapper.run(q.contiguous(), (self._kv.k[layer], self._kv.v[layer]))

        return attend
