"""Checksums of pages: their value, who verifies them, and the effect of a flipped bit."""

import numpy as np
import pytest

from sglang_scout import _native
from sglang_scout.worker.arena import PageChecksums
from sglang_scout.worker.client import WorkerClient
from worker_cases import buffers, close, make_request, oracle


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def reference(k: np.ndarray, v: np.ndarray) -> int:
    """The checksum as defined in sgl-kernel/src/checksums.h."""
    words = np.concatenate([k, v]).view(np.uint64)
    return crc32c(b"".join(words[i::4].tobytes() for i in range(4)))


@pytest.mark.parametrize("nbytes", [32, 96, 512, 1056])
def test_the_value_is_that_of_the_reference(nbytes):
    assert crc32c(b"123456789") == 0xE3069283, "as published"
    k, v = np.random.default_rng(nbytes).integers(0, 256, (2, nbytes), np.uint8)
    assert _native.page_checksum(k, v) == reference(k, v)


@pytest.fixture
def make_sealed(make_arena):
    """An arena with all pages sealed, and its checksums."""

    def make(**changes):
        arena = make_arena(checksums=True, **changes)
        checksums = PageChecksums(arena)
        checksums.seal(np.arange(arena.spec.num_pages))
        return arena, checksums

    return make


def flip(arena, layer: int, page: int) -> None:
    """A bit of a page: in its V, or in the first layer in its K."""
    plane = arena.v_pages(layer) if layer else arena.k_pages(layer)
    plane[page].reshape(-1).view(np.uint8)[5] ^= 4


def check_all(arena, checksums: PageChecksums) -> list[list[int]]:
    size = arena.spec.num_layers, arena.spec.num_pages
    layers, pages = np.divmod(np.arange(size[0] * size[1]), size[1])
    checksums.check(layers, pages)
    return checksums.damaged().tolist()


@pytest.mark.parametrize("changes", [{}, {"kv_dtype": "float8_e4m3fn"}, {"num_nodes": 2}])
def test_a_flipped_bit_is_found_once_and_forgotten_with_its_page(make_sealed, changes):
    arena, checksums = make_sealed(**changes)
    assert check_all(arena, checksums) == [] and checksums.failures == 0
    flip(arena, 0, 7)
    flip(arena, 2, 39)
    assert check_all(arena, checksums) == [[0, 7], [2, 39]]
    assert check_all(arena, checksums) == [[0, 7], [2, 39]] and checksums.failures == 2
    flip(arena, 0, 7)
    assert check_all(arena, checksums) == [[0, 7], [2, 39]], "what has been computed was wrong"
    checksums.clear(np.array([7]))
    assert checksums.damaged().tolist() == [[2, 39]]
    flip(arena, 0, 7)
    assert check_all(arena, checksums) == [[2, 39]], "a page without a checksum may change"
    for _ in range(2):
        checksums.seal(np.array([7]))  # only once: then it stays wrong
        flip(arena, 0, 7)
    assert check_all(arena, checksums) == [[2, 39]]
    flip(arena, 0, 7)
    assert check_all(arena, checksums) == [[0, 7], [2, 39]]


def test_a_copy_takes_its_checksums_along(make_sealed):
    arena, checksums = make_sealed()
    flip(arena, 1, 6)
    check_all(arena, checksums)
    old, new = np.array([5, 6]), np.array([8, 9])
    words = checksums.taken(old)
    checksums.clear(np.concatenate([old, new]))
    for layer in range(arena.spec.num_layers):
        for plane in (arena.k_pages(layer), arena.v_pages(layer)):
            plane[new] = plane[old]
    checksums.put(new, words)
    assert check_all(arena, checksums) == [[1, 9]], "it was wrong when it was copied"


@pytest.mark.parametrize(
    ("serves", "changes"),
    [(True, {"lists": 2, "max_batch": 8}), (True, {"num_nodes": 2}), (False, {"num_nodes": 2})],
)
def test_a_damaged_page_is_left_out_and_other_rows_keep_their_bits(
    make_sealed, cpu, serves, changes
):
    arena, checksums = make_sealed(**changes)
    q, pages, n_pages = make_request(arena.spec, 4, 1, full=True)
    pages[pages == 11] = 12
    pages[0, 2] = 11
    nodes = [[cpu], []] if "num_nodes" in changes else None
    client = WorkerClient(arena, [cpu], nodes=nodes)
    if serves:
        client.start()
    answers = []
    for step in range(2):
        answers.append(buffers(arena, 4))
        reply = client.wait(client.post(1, step, q, pages, n_pages), *answers[-1])
        assert (reply.fallback_pages > 0) != serves
        flip(arena, 1, 11)
    client.stop()
    assert checksums.damaged().tolist() == [[1, 11]] and checksums.failures == 1
    before, after = (out for out, _ in answers)
    assert not np.array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1:], after[1:])
    pages[0, 2] = -1
    close(answers[1], oracle(arena, 1, q, pages, n_pages))
