"""What the machine computes and what it refuses, on PTX written by hand."""

import os

import numpy as np
import pytest

from ptx_machine.machine import Machine
from ptx_machine.memory import Fault, Global
from ptx_machine.program import parse

THREADS = 64  # two warps


def run(body, *arrays, programs=1, shared=1024, threads=THREADS):
    """Run ``body`` with the addresses of ``arrays`` in %rd1 and up; %r1 is the thread, %r2 the program."""
    names = [f"p{i}" for i in range(len(arrays))]
    loads = "\n".join(f"ld.param.b64 %rd{i + 1}, [{name}];" for i, name in enumerate(names))
    parameters = ",\n".join(f".param .u64 .ptr {name}" for name in names)
    text = f"""
.version 8.7
.visible .entry kernel(
{parameters}
)
.reqntid {threads}
{{
    .reg .pred %p<9>;
    .reg .b32 %r<99>;
    .reg .b64 %rd<99>;
    {loads}
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.b32 %r3, global_smem;
    {body}
    ret;
}}
"""
    memory = Global()
    for array in arrays:
        memory.add(array.ctypes.data, array.nbytes)
    addresses = [array.ctypes.data for array in arrays]
    Machine(parse(text), addresses, (programs, 1, 1), shared, memory).run()


MINE = """
    mad.wide.u32 %rd50, %r1, 4, %rd1;   // my word of the first array
    shl.b32 %r50, %r1, 2;
    add.s32 %r51, %r3, %r50;            // my word of shared memory
    xor.b32 %r52, %r51, 128;            // that of a thread of the other warp
"""


def words(n, value=0):
    return np.full(n, value, np.uint32)


def test_computes_in_a_loop_that_threads_leave_at_different_times():
    """Thread t adds up 0 to t."""
    out = words(THREADS)
    run(
        MINE
        + """
    mov.b32 %r10, 0;
    mov.b32 %r11, 0;
$loop:
    add.s32 %r11, %r11, %r10;
    add.s32 %r10, %r10, 1;
    setp.le.s32 %p1, %r10, %r1;
    @%p1 bra $loop;
    st.global.b32 [%rd50], %r11;
""",
        out,
    )
    assert out.tolist() == [t * (t + 1) // 2 for t in range(THREADS)]


@pytest.mark.parametrize(
    "access",
    ["ld.global.b32 %r10, [%rd50+256]", "st.global.b32 [%rd50+256], %r1"],
    ids=["read", "write"],
)
def test_refuses_what_lies_in_no_allocation(access):
    with pytest.raises(Fault, match="belongs to no allocation|beyond the end"):
        run(MINE + access + ";", words(THREADS))


def test_refuses_an_access_that_is_not_aligned_to_its_size():
    with pytest.raises(Fault, match="not a multiple of 8"):
        run("ld.global.b64 %rd10, [%rd1+4];", np.zeros(8, np.uint64))


def test_refuses_what_lies_outside_of_shared_memory():
    with pytest.raises(Fault, match="outside of 128 bytes"):
        run(MINE + "st.shared.b32 [%r51], %r1;", words(1), shared=128)


EXCHANGE = MINE + "st.shared.b32 [%r51], %r1; {barrier} ld.shared.b32 %r10, [%r52]; {last}"


def test_warps_that_exchange_through_shared_memory_need_a_barrier():
    out = words(THREADS)
    store = "st.global.b32 [%rd50], %r10;"
    run(EXCHANGE.format(barrier="bar.sync 0;", last=store), out)
    assert out.tolist() == [t ^ 32 for t in range(THREADS)]
    with pytest.raises(Fault, match="race in shared memory: read of byte"):
        run(EXCHANGE.format(barrier="", last=store), out)


def test_nothing_may_be_written_that_another_warp_still_reads():
    again = "st.shared.b32 [%r51], 7;"
    run(EXCHANGE.format(barrier="bar.sync 0;", last="bar.sync 0;" + again), words(1))
    with pytest.raises(Fault, match="write of byte 0 that another warp has read"):
        run(EXCHANGE.format(barrier="bar.sync 0;", last=again), words(1))


def test_an_array_that_is_read_whole_and_written_needs_a_barrier_between():
    """As a merge in place would: all warps read, one writes."""
    body = "ld.global.b32 %r10, [%rd1]; {barrier} setp.eq.b32 %p1, %r1, 0; @%p1 st.global.b32 [%rd1], 5;"
    run(body.format(barrier="bar.sync 0;"), words(1))
    with pytest.raises(Fault, match="race in global memory"):
        run(body.format(barrier=""), words(1))


def test_what_does_not_change_a_byte_is_no_race():
    run("ld.global.b32 %r10, [%rd1]; st.global.b32 [%rd1], 5;", words(1, 5))


LAST = """
    setp.eq.b32 %p1, %r1, 0;
    mad.wide.u32 %rd50, %r2, 4, %rd1;
    @%p1 st.global.b32 [%rd50], %r2;
    bar.sync 0;
    mov.b32 %r20, 0;
    {arrive}
    setp.eq.b32 %p2, %r20, 3;
    and.pred %p2, %p2, %p1;
    @%p2 ld.global.b32 %r21, [%rd1];
"""


def test_the_last_program_to_arrive_may_read_what_the_others_wrote():
    arrive = "@%p1 atom.global.sys.acq_rel.add.u32 %r20, [%rd2], 1;"
    arrived = words(1)
    run(LAST.format(arrive=arrive), words(4), arrived, programs=4)
    assert arrived[0] == 4


def test_programs_that_nothing_orders_may_not():
    """Here the number says that all have arrived, but nothing was released."""
    with pytest.raises(Fault, match="race in global memory"):
        run(LAST.format(arrive="mov.b32 %r20, 3;"), words(4), words(1), programs=4)


RELEASE = """
    shr.u32 %r20, %r1, 5;
    setp.eq.b32 %p1, %r1, 0;          // the thread that arrives
    setp.eq.b32 %p2, %r1, 32;         // one of another warp
    mad.wide.u32 %rd50, %r2, 4, %rd1;
    {early}
    {before}
    mov.b32 %r21, 0;
    @%p1 atom.global.sys.acq_rel.add.u32 %r21, [%rd2], 1;
    @%p1 st.shared.b32 [%r3], %r21;
    {after}
    bar.sync 0;
    ld.shared.b32 %r21, [%r3];
    setp.eq.b32 %p3, %r21, 1;         // the second of two programs
    and.pred %p3, %p3, %p2;
    {late}
"""
WRITES, READS = "@%p2 st.global.b32 [%rd50], 7;", "@%p3 ld.global.b32 %r22, [%rd1];"


def test_an_atomic_releases_what_other_warps_wrote_before_a_barrier_only():
    run(
        RELEASE.format(early=WRITES, before="bar.sync 0;", after="", late=READS),
        words(2),
        words(1),
        programs=2,
    )
    with pytest.raises(Fault, match="race in global memory"):
        run(
            RELEASE.format(early=WRITES, before="", after="", late=READS),
            words(2),
            words(1),
            programs=2,
        )


def test_other_warps_acquire_with_the_next_barrier_only():
    """The number of the atomic reaches them here without one, as a shuffle or a lucky read could bring it."""
    early = "and.pred %p4, %p2, %p2;" + WRITES
    hasty = "setp.eq.b32 %p3, %r2, 1; and.pred %p3, %p3, %p2;" + READS
    with pytest.raises(Fault, match="race in global memory"):
        run(
            RELEASE.format(early=early, before="bar.sync 0;", after=hasty, late=""),
            words(2),
            words(1),
            programs=2,
        )


def test_a_write_that_changes_nothing_does_not_hide_the_one_before():
    """Warp 0 writes 5, warp 1 writes 5 and then 7."""
    body = """
    setp.lt.u32 %p1, %r1, 1;
    setp.eq.b32 %p2, %r1, 32;
    @%p1 st.global.b32 [%rd1], 5;
    @%p2 st.global.b32 [%rd1], 5;
    @%p2 st.global.b32 [%rd1], 7;
"""
    with pytest.raises(Fault, match="write of byte 0 that another warp has written"):
        run(body, words(1))


def test_copies_of_a_value_in_shared_memory_may_differ_in_the_last_bits_alone():
    store = "shr.u32 %r20, %r1, 5; add.s32 %r21, %r20, {first}; st.shared.b32 [%r3], %r21;"
    run(store.format(first=0x3F800000), words(1))  # 1.0 and the next float
    with pytest.raises(Fault, match="by the same instruction"):
        run(store.format(first=100), words(1))


@pytest.mark.parametrize(
    "instruction",
    [
        "bar.warp.sync -1",
        "@%p1 bar.sync 0",
        "add.sat.f32 %r10, %r1, %r1",
        "cvt.rzi.sat.s32.f32 %r10, %r1",
    ],
)
def test_what_changes_an_instruction_and_is_not_known_is_refused(instruction):
    with pytest.raises(NotImplementedError, match="PTX instruction"):
        run(f"setp.eq.b32 %p1, %r1, 0; {instruction};")


COPY = """
    setp.lt.u32 %p1, %r1, 16;
    shl.b32 %r10, %r1, 4;
    add.s32 %r11, %r3, %r10;
    mad.wide.u32 %rd10, %r1, 16, %rd1;
    @%p1 cp.async.cg.shared.global [%r11], [%rd10], 0x10;
    cp.async.commit_group;
    {wait}
    ld.shared.b32 %r20, [%r51];
    st.global.b32 [%rd50], %r20;
"""


def test_an_asynchronous_copy_is_there_once_it_has_been_waited_for():
    source = np.arange(THREADS, dtype=np.uint32) * 3
    out = source.copy()
    run(MINE + COPY.format(wait="cp.async.wait_group 0; bar.sync 0;"), out)
    assert out.tolist() == source.tolist()
    with pytest.raises(Fault, match="asynchronous copy is still writing"):
        run(MINE + COPY.format(wait=""), out)
    with pytest.raises(Fault, match="race in shared memory"):  # waited, but only for its own
        run(MINE + COPY.format(wait="cp.async.wait_group 0;"), out)


def test_each_program_waits_for_its_own_copies():
    wait = "setp.eq.b32 %p5, %r2, 0; @%p5 bra $over; cp.async.wait_group 0; $over: bar.sync 0;"
    with pytest.raises(Fault, match="asynchronous copy is still writing"):
        run(MINE + COPY.format(wait=wait), words(THREADS, 3), programs=2)


def test_a_barrier_that_some_threads_do_not_reach_is_refused():
    with pytest.raises(Fault, match="wait at"):
        run("setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $other;\nbar.sync 0;\n$other: bar.sync 0;")


def test_a_shuffle_that_half_a_warp_does_not_reach_is_refused():
    with pytest.raises(Fault, match="others wait for them"):
        run(
            "and.b32 %r10, %r1, 1;\nsetp.eq.b32 %p1, %r10, 0;\n@%p1 bra $end;\n"
            "shfl.sync.bfly.b32 %r11, %r1, 1, 31, -1;\n$end: mov.b32 %r12, 0;"
        )


def test_a_register_without_a_value_is_refused():
    with pytest.raises(Fault, match="read before it is written"):
        run("add.s32 %r10, %r11, 1;")


def test_an_unknown_instruction_is_named():
    with pytest.raises(NotImplementedError, match="vote.sync.any.pred"):
        run("vote.sync.any.pred %p1, %p2, -1;")


@pytest.mark.skipif(not os.environ.get("SCOUT_PTX_MACHINE"), reason="SCOUT_PTX_MACHINE is not set")
def test_launches_of_kernels_come_here():
    import torch

    from ptx_machine import launch
    from sglang_scout.ops.merge import merge_states

    before = launch.launches.get("merge_kernel", 0)
    parts = torch.ones(1, 2, 16), torch.zeros(1, 2), torch.zeros(1, 2, 16), torch.zeros(1, 2)
    assert (merge_states(*parts, impl="triton")[0] == 0.5).all()
    assert launch.launches["merge_kernel"] == before + 1
