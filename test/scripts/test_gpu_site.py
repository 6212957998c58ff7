"""What ``scripts/gpu_site.py`` takes and leaves, without a network and without SGLang's imports."""

import importlib.metadata

import pytest

import gpu_site


@pytest.mark.parametrize(
    "name",
    [
        "sgl_kernel/flash_ops.abi3.so",
        "sgl_kernel/sm100/common_ops.abi3.so",
        "sglang/srt/__pycache__/x.cpython-312.pyc",
        "sglang/multimodal_gen/runtime.py",
        "bin/sglang",
    ],
)
def test_left_out(name):
    assert gpu_site.DROP.search(name)


@pytest.mark.parametrize(
    "name",
    [
        "sgl_kernel/sm90/common_ops.abi3.so",
        "sgl_kernel/flash_attn.py",
        "sglang/srt/layers/sampler.py",
        "sglang-0.5.15.post1.dist-info/METADATA",
        "flashinfer/data/csrc/sampling.cu",
    ],
)
def test_packed(name):
    assert not gpu_site.DROP.search(name)


def test_a_view_has_the_chosen_packages_alone(tmp_path):
    gpu_site.link({"msgspec", "pytest-timeout"}, tmp_path)
    names = {d.name for d in importlib.metadata.distributions(path=[str(tmp_path)])}
    assert names == {"msgspec", "pytest-timeout"}
    assert (tmp_path / "msgspec" / "__init__.py").exists()
    assert not (tmp_path / "numpy").exists()
