"""Prefill attention on the CPU against SGLang's own, whose rows it must reproduce."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace

import pytest
import torch

cpu_extend = pytest.importorskip("sglang_scout.plugin.fixes", reason="needs SGLang")
torch_native = pytest.importorskip(
    "sglang.srt.layers.attention.torch_native_backend", reason="needs SGLang"
)
ORIGINAL = torch_native.TorchNativeAttnBackend._run_sdpa_forward_extend


def run(function, lengths, *, causal=True, dtype=torch.float32, heads=4, kv_heads=2, **options):
    """Rows [T, HQ, D] for sequences of (cached, new) tokens in shuffled slots."""
    rng = torch.Generator().manual_seed(7)
    totals = [cached + new for cached, new in lengths]
    slots = torch.randperm(sum(totals) + 5, generator=rng)
    table = torch.zeros(len(lengths) + 2, max(totals), dtype=torch.int64)
    for i, total in enumerate(totals):
        table[i + 1, :total] = slots[sum(totals[:i]) : sum(totals[: i + 1])]
    caches = torch.randn(2, len(slots), kv_heads, 64, generator=rng).to(dtype)
    query = torch.randn(sum(new for _, new in lengths), heads, 64, generator=rng).to(dtype)
    as_tensor = torch.tensor
    return function(
        SimpleNamespace(), query, torch.full_like(query, torch.nan), *caches, table,
        torch.arange(len(lengths)) + 1, as_tensor(totals), as_tensor([c for c, _ in lengths]),
        as_tensor([n for _, n in lengths]), scaling=0.125, enable_gqa=True, causal=causal, **options,
    )  # fmt: skip


def ours(calls):
    def around(*args, **kwargs):
        def original(*args, **kwargs):
            calls.append(args[7].tolist())
            return ORIGINAL(*args, **kwargs)

        return cpu_extend.around_extend(original, *args, **kwargs)

    return around


@pytest.mark.parametrize(
    ("mask_elements", "heads", "dtype", "tolerance"),
    [
        (cpu_extend.MASK_ELEMENTS, 2, torch.float32, 1e-5),
        (100, 4, torch.float32, 1e-5),
        (1, 4, torch.bfloat16, 2e-2),
    ],
)
def test_the_rows_are_those_of_sglang(monkeypatch, mask_elements, heads, dtype, tolerance):
    monkeypatch.setattr(cpu_extend, "MASK_ELEMENTS", mask_elements)
    lengths = [(0, 9), (50, 7), (64, 1), (3, 30), (31, 33), (200, 64)]
    calls: list[list[int]] = []
    got = run(ours(calls), lengths, heads=heads, dtype=dtype)
    expected = run(ORIGINAL, lengths, heads=heads, dtype=dtype)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert calls == [[9], [33], [64]], "mostly new tokens: the original is the faster one"


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"sliding_window_size": 8},
        {"sliding_window_size": 0},
        {"encoder_lens": torch.tensor([3, 0])},
        {"is_cross_attn": True},
    ],
)
def test_what_it_does_not_know_goes_to_sglang(options):
    calls: list[list[int]] = []

    def around(*args, **kwargs):
        def original(*args, **kwargs):
            calls.append(args[7].tolist())
            assert all(kwargs.get(k, args[-1]) is options[k] for k in options), "all is handed on"
            return args[2]

        return cpu_extend.around_extend(original, *args, **kwargs)

    got = run(around, [(100, 20), (7, 1)], **options)
    assert calls == [[120, 8]] and got.isnan().all(), "nothing is written here"
