"""Decode steps with all KV on the device: the baseline for co-attention."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmark import device
from benchmark.decode.harness import PAGE
from benchmark.decode.model import DummyModel, ModelSize


class FullAttention:
    """All KV on the device, attended to by FlashInfer, as in stock SGLang."""

    def __init__(self, model: DummyModel, size: ModelSize, batch: int, context: int) -> None:
        self.size, self.batch = size, batch
        each = context // PAGE
        shape = (size.layers, batch * each, PAGE, size.kv_heads, size.head_dim)
        self.k, self.v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        for plane in (self.k, self.v):
            plane.normal_()
        self.table = torch.arange(batch * each, dtype=torch.int32, device="cuda").view(batch, each)
        self.x = torch.randn(batch, size.hidden, device="cuda").to(torch.bfloat16)
        self.out = torch.empty_like(self.x)
        self.model = model
        self._attend = self._flashinfer(each)
        self.graph = device.captured(self._layers)

    def _layers(self) -> None:
        self.out.copy_(self.model.forward(self.x, lambda *_: None, self._attend))

    def _flashinfer(self, each: int) -> Callable[..., torch.Tensor]:
        import flashinfer

        size = self.size
        work = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda") * each
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            work, "NHD", use_cuda_graph=True, use_tensor_cores=True,
            paged_kv_indptr_buffer=starts.clone(),
            paged_kv_indices_buffer=self.table.flatten().clone(),
            paged_kv_last_page_len_buffer=torch.full(
                (self.batch,), PAGE, dtype=torch.int32, device="cuda"
            ),
        )  # fmt: skip
        wrapper.plan(
            starts, self.table.flatten(),
            torch.full((self.batch,), PAGE, dtype=torch.int32, device="cuda"),
            size.q_heads, size.kv_heads, size.head_dim, PAGE, q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )  # fmt: skip

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return wrapper.run(q.contiguous(), (self.k[layer], self.v[layer]))

        return attend


def main() -> int:
    """Compile FlashInfer's kernels for the sizes of Qwen3, as used by ``decode`` and a stock server, or wait for a
    process that is already doing so."""
    begin = time.monotonic()
    size = ModelSize(1, 256, 32, 8, 128, 512)
    model = DummyModel(size, torch.bfloat16, "cuda")
    harness = FullAttention(model, size, 1, 2 * PAGE)
    harness.graph.replay()
    torch.cuda.synchronize()
    finite = bool(torch.isfinite(harness.out).all())
    print(f"FlashInfer: {'ready' if finite else 'wrong'} after {time.monotonic() - begin:.0f} s")
    return 0 if finite else 1


if __name__ == "__main__":
    sys.exit(main())
