"""Every kernel compiles for the device, without one. Kernels that run interpreted may still not compile."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_scout.ops.triton.attend import programs_per_sm as attends
from sglang_scout.ops.triton.rotated_scores import programs_per_sm
from sglang_scout.ops.triton.score import PER_SM

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_PTXAS = 77


def compile_kernels(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "compile_kernels.py", *arguments],
        env=environment | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
    )
    if done.returncode == WITHOUT_PTXAS:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What is printed, and a folder with the code of each kernel."""
    folder = tmp_path_factory.mktemp("ptx")
    return compile_kernels("--ptx", folder), folder


@pytest.fixture(scope="module")
def ptx(compiled):
    """Kernel name -> its code, of the first case."""
    folder = compiled[1]
    paths = sorted(folder.iterdir(), key=lambda p: int(p.stem.rpartition("-")[2]), reverse=True)
    return {path.stem.rpartition("-")[0]: path.read_text() for path in paths}


def test_every_kernel_compiles_and_none_spills_more_than_some_words(ptx):
    assert {"bounds_kernel", "attend_kernel", "select_kernel", "post_kernel"} <= set(ptx)


@pytest.mark.parametrize(
    ("name", "case", "per_sm"),
    [
        ("attend_kernel", "attend_pages, Qwen3-14B", attends(torch.bfloat16, 128)),
        ("attend_kernel", "attend_pages, Qwen3-14B, e4m3", attends(torch.float8_e4m3fn, 128)),
        ("attend_kernel", "attend_pages, float16", attends(torch.float16, 128)),
        ("attend_kernel", "attend_pages, float32", attends(torch.float32, 128)),
        ("attend_kernel", "attend_pages, D=256", attends(torch.bfloat16, 256)),
        ("bounds_kernel", "score_pages, Qwen3-14B", PER_SM),
        ("bounds_kernel", "score_pages, D=256", PER_SM),
        ("rotated_sums_kernel", "score_rotated, Qwen3-14B", programs_per_sm(128)),
        ("rotated_sums_kernel", "score_rotated, D=96", programs_per_sm(128)),
        ("rotated_sums_kernel", "score_rotated, D=256", programs_per_sm(256)),
    ],
)
def test_an_sm_holds_the_programs_that_the_work_is_divided_for(compiled, name, case, per_sm):
    row = rf"^{name} +4 warps +(\d+) registers.* (\d+) B shared  {re.escape(case)}$"
    registers, shared = map(int, re.search(row, compiled[0], re.M).groups())
    assert 4 * 32 * 8 * -(-registers // 8) * per_sm <= 65536  # allocated in eights
    assert (shared + 1024) * per_sm <= 228 << 10


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("arch", ["80", "100", "120"])
def test_other_devices_take_the_same_kernels(arch):
    """The oldest architecture, Blackwell, and the one with the least shared memory."""
    compile_kernels("--arch", arch)


@pytest.mark.parametrize("name", ["bounds_kernel", "attend_kernel"])
def test_products_run_on_tensor_cores_and_tiles_are_read_16_bytes_at_a_time(ptx, name):
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx[name]
    assert "ld.global.v4" in ptx[name]
    assert "cp.async.cg.shared.global" in ptx[name]  # pipelined


def test_a_mask_of_stored_bits_is_all_that_makes_an_operand(ptx):
    """Warp-group MMAs of 64 pages with bits as register operands, loaded 16 bytes at a time."""
    code = ptx["rotated_sums_kernel"]
    products = "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8"
    assert (
        code.count(products) == 4 + 2 * 4 * 4
    )  # D / 32 of the mean, and of each plane of four tokens
    # For each register with the bits of two tokens in two rows: 4 masks per token, none per byte.
    masks = [f"and.b32 .*, {(0x01010101 << r)};" for r in range(4)]
    assert [len(re.findall(mask, code)) for mask in masks] == [32] * 4
    assert "prmt" not in code
    assert "cp.async.cg.shared.global" in code


def test_a_post_is_released_behind_all_it_wrote(ptx):
    code = ptx["post_kernel"]
    arrival = code.index("atom.global.sys.acq_rel")
    number, head = (m.start() for m in re.finditer("@first st.release.sys.global.s64", code))
    rows = code.rindex("st.global.v4.b32")
    assert rows < arrival < number
    assert "bar.sync" in code[rows:arrival]
    assert code[arrival:number].count("st.global") == 5  # counter, the other header words
    assert code[number:head].count("st.global") == 2  # claim, log; after it, device words


def test_a_wait_acquires_and_is_bounded_by_the_clock(ptx):
    code = ptx["merge_answer_kernel"]
    # In program 0 and in those that wait for it.
    assert code.count("ld.acquire.sys.global.s64") >= 4
    assert code.count("%globaltimer") >= 4
    # Each loop sleeps before it polls again: once from its label to the branch back.
    loops = re.findall(
        r"^(\$L__BB\w+):(?:(?!^\$L__BB).)*?nanosleep.u32(.*?)bra(?:.uni)?\s+\1;", code, re.M | re.S
    )
    assert len(loops) == 2 and all("ld.acquire.sys" in rest for _, rest in loops)
    assert "ld.volatile.global.v4" in code
    assert "bar.sync" not in code  # one warp each
