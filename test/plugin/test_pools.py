"""KV pools: the allocator with host lists, what a retracted request keeps, and which digests have arrived."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from page_weights import digest_kinds, digest_pool
from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.numa import CpuPlan
from sglang_scout.engine.memory import ServerSize
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.plugin import pools
from sglang_scout.plugin.ranks import RankCpus, RankMemory
from sglang_scout.policy import Context, make_policy

SIZE, NONE = 8, torch.empty(0, dtype=torch.int64)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "extend", "resume", "decode", "free", "free_together", "clear"]),
        st.integers(1, 40),
    ),
    max_size=25,
)


class Listener:
    """Knows which pages are allocated."""

    def __init__(self):
        self.out = set()
        self.fresh = set()  # freed most recently

    def allocate_pages(self, pages):
        assert not self.out & set(pages.tolist()), "a page was handed out twice"
        self.out |= set(pages.tolist())

    def free_pages(self, pages):
        assert set(pages.tolist()) <= self.out, "a page was freed that was not out"
        self.out -= set(pages.tolist())
        self.fresh = set(pages.tolist())

    def may_be_written(self, pages):
        return bool(self.fresh & set(pages.tolist()))

    def clear(self):
        self.out.clear()


def make(pages=30, kvcache=None):
    more = {"need_sort": True, "kvcache": kvcache, "dtype": torch.float32, "device": "cpu"}
    made = pools.ScoutAllocator(pages * SIZE, page_size=SIZE, **more)
    made.listener = Listener()
    return made


class User:
    """Requests on one allocator."""

    def __init__(self):
        self.allocator = make()
        self.requests = []  # locations of each

    def _got(self, pages, allocate, *given):
        """Locations, if so many pages are free."""
        is_enough = pages * SIZE <= self.allocator.available_size()
        got = allocate(*given)
        assert (got is not None) == is_enough
        return got if is_enough else NONE

    def alloc(self, number):
        self.requests.append(self._got(number // SIZE, self.allocator.alloc, number))

    def extend(self, number, prefix=NONE):
        before, after = torch.tensor([len(prefix)]), torch.tensor([len(prefix) + number])
        last = prefix[-1:] if len(prefix) else torch.tensor([-1])
        pages = int((after + SIZE - 1) // SIZE - (before + SIZE - 1) // SIZE)
        given = before, before, after, after, last, number
        got = self._got(pages, self.allocator.alloc_extend, *given)
        self.requests.append(torch.cat([prefix, got]))

    def resume(self, number):
        if self.requests:
            self.extend(number, self.requests.pop(0))

    def decode(self, _):
        if not self.requests:
            return
        lengths = torch.tensor([len(r) + 1 for r in self.requests])
        last, opens = torch.stack([r[-1] for r in self.requests]), lengths % SIZE == 1
        got = self._got(int(opens.sum()), self.allocator.alloc_decode, lengths, lengths, last)
        if len(got):
            opened = torch.where(opens, got // SIZE, -1)
            assert self.allocator.opened.tolist() == opened.tolist()
            pairs = zip(self.requests, got, strict=True)
            self.requests = [torch.cat([r, x[None]]) for r, x in pairs]

    def free(self, number):
        for _ in range(min(number % 3 + 1, len(self.requests))):
            self.allocator.free(self.requests.pop(0))

    def free_together(self, number):
        self.allocator.free_group_begin()
        self.free(number)
        self.allocator.free_group_end()

    def clear(self, _):
        self.allocator.clear()
        self.requests.clear()


@given(OPERATIONS)
def test_tokens_fill_pages_in_order_and_the_listener_hears_of_each_page(operations):
    user = User()
    for operation, number in operations:
        getattr(user, operation)(number)
        user.requests = [r for r in user.requests if len(r)]
        held = []
        for locations in user.requests:
            pages = locations[::SIZE] // SIZE
            assert torch.equal(locations, tokens_of(pages, SIZE)[: len(locations)])
            held += pages.tolist()
        assert len(held) == len(set(held)) == user.allocator.used_pages
        assert user.allocator.listener.out == set(held) <= set(range(1, 31))
        assert user.allocator.available_size() == (30 - len(held)) * SIZE


def tokens_of(pages, size):
    return (torch.as_tensor(pages)[:, None] * size + torch.arange(size)).flatten()


def extend(made, total):
    """A new request of ``total`` tokens."""
    none, end = torch.zeros(1, dtype=torch.int64), torch.tensor([total])
    return made.alloc_extend(none, none, end, end, none - 1, total)


def test_a_transfer_waits_for_a_step_that_may_still_write_a_page(monkeypatch):
    """SGLang launches a step before it knows that the last one has ended some of its requests."""
    waits = []
    monkeypatch.setattr(pools, "_synchronize", waits.append)
    made = make()
    listener = made.listener
    most = made.alloc(28 * SIZE)
    made.free(most[: 4 * SIZE])
    assert made.alloc(2 * SIZE) is not None and not waits  # of never used pages
    length = torch.tensor([SIZE + 1])
    made.alloc_decode(length, length, most[-1:])  # of those just freed: in stream order
    assert listener.out & listener.fresh and not waits
    made.alloc(SIZE)
    assert len(waits) == 1
    extend(made, SIZE)
    assert len(waits) == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 500), unique=True),
    st.integers(1, 300),
    st.randoms(use_true_random=False),
)
def test_every_beginning_of_the_free_pages_is_of_all_nodes(pages, stripe, random):
    random.shuffle(pages)
    made = pools.alternate_nodes(torch.tensor(pages, dtype=torch.int64), stripe).tolist()
    assert sorted(made) == sorted(pages)
    left = {node: sum(p // stripe == node for p in pages) for node in {p // stripe for p in pages}}
    taken = dict.fromkeys(left, 0)
    for page in made:
        taken[page // stripe] += 1
        most = max(taken.values())
        for node, count in taken.items():
            assert count >= min(left[node], most - pools.NODE_RUN_PAGES), "a node lags behind"
    runs = sum(b != a + 1 for a, b in zip(made, made[1:], strict=False))
    gaps = sum(b != a + 1 for a, b in zip(sorted(pages), sorted(pages)[1:], strict=False))
    assert runs <= gaps + len(pages) // pools.NODE_RUN_PAGES + len(left)


def test_requests_take_pages_of_both_nodes_from_the_first_on():
    assert torch.equal(make(64).free_pages, torch.arange(1, 65)), "the order of SGLang"
    spec = SimpleNamespace(num_nodes=2, stripe_pages=128)
    made = make(256, SimpleNamespace(arena=SimpleNamespace(spec=spec)))
    held = [extend(made, 32 * SIZE) for _ in range(4)]
    assert [(torch.unique(x // SIZE) < 128).sum() for x in held] == [16] * 4
    for locations in held[::2]:
        made.free(locations)
    again = [extend(made, 32 * SIZE) for _ in range(6)]  # more than was left: all is re-sorted
    assert made.used_pages == 256
    counts = [int((torch.unique(a // SIZE) < 128).sum()) for a in again]
    assert all(8 <= count <= 24 for count in counts), counts


PAGE = 32
SHAPE = ModelShape(3, 4, 2, 64, PAGE, torch.float32, 0.125)


def host_pool(dtype):
    tokens = 40 * PAGE
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    config = OffloadConfig("scout", digest="minmax", page_checksums=True)
    policy, of_requests = make_policy(Context(config, shape.num_layers, 1)), (2, 4 * PAGE)
    size = ServerSize(config, policy, shape, *of_requests, node_cpus=[1])
    sglang = dict(page_size=PAGE, dtype=dtype, head_num=2, head_dim=64, layer_num=3, device="cpu")
    memory = RankMemory(None, RankCpus(CpuPlan([0], [], [], ""), {}), size, None)
    own = dict(memory=memory, plan=size.plan(tokens // PAGE + 1))
    made = pools.HostKVPool(tokens, enable_memory_saver=False, **sglang, **own)
    for plane in (*made.k_buffer, *made.v_buffer):
        plane.copy_(torch.randn(plane.shape))
    return made


@pytest.mark.parametrize(
    ("dtype", "length"),
    [(torch.bfloat16, 1), (torch.bfloat16, PAGE), (torch.float32, 5 * PAGE + 7)],
)
def test_a_retracted_request_gets_its_k_and_v_back_elsewhere(dtype, length):
    """In whole pages, which are copied many times faster than tokens, and nothing else is written."""
    made = host_pool(dtype)
    count = -(-length // PAGE)
    old, new = [7, 8, 9, 3, 20, 21][:count], [30, 4, 5, 6, 31, 2][:count]
    here, there = (tokens_of(x, PAGE)[:length].int() for x in (old, new))
    planes = (*made.k_buffer, *made.v_buffer)
    expected = [plane[here].clone() for plane in planes]
    checksums = made.host_pages.checksums
    checksums.seal(np.array(old[: length // PAGE]))
    kept = made.get_cpu_copy(here)
    of_planes = 2 * 3 * count * PAGE * 2 * 64 * dtype.itemsize
    assert kept[0].nbytes == of_planes == made.copy_bytes(length)
    for plane in planes:
        plane.copy_(torch.randn(plane.shape))  # reused by other requests
    before = [plane.clone() for plane in planes]
    made.load_cpu_copy(kept, there)
    others = torch.from_numpy(np.setdiff1d(np.arange(41), new))
    for plane, wanted, was in zip(planes, expected, before, strict=True):
        assert torch.equal(plane[there], wanted)
        assert torch.equal(plane.view(41, -1)[others], was.view(41, -1)[others])
    is_sealed, full = (checksums.words != 0).all(axis=0), [i < length // PAGE for i in range(count)]
    assert is_sealed[new].tolist() == is_sealed[old].tolist() == full
    checksums.check(np.zeros(count), np.array(new))
    assert not checksums.failures, "they are of the K and V that came back"


@pytest.mark.parametrize(("layer", "half"), [(0, 0), (1, 1), (2, 0)])
@pytest.mark.parametrize("kind", digest_kinds())
def test_a_digest_lacks_whatever_layer_or_half_did_not_arrive(kind, layer, half):
    k = [torch.randn(5 * PAGE, 2, 64) for _ in range(3)]
    host = HostPages(SHAPE, k, k)
    there, here = (digest_pool(SHAPE, 5, kind) for _ in range(2))
    pages = np.array([1, 2])
    assert list(here.accept(pages)) == [1, 2]
    there.build(pages, host)
    for part, (mine, theirs) in enumerate(zip(here.parts, there.parts, strict=True)):
        mine[:, 2] = theirs[:, 2]
        for i in range(3):
            if (i, part) != (layer, half):
                mine[i, 1] = theirs[i, 1]
    assert list(here.accept(pages)) == [1] and here.valid.tolist() == [0, 0, 1, 0, 0]
    here.unset(pages)
    assert list(here.accept(pages)) == [1, 2] and not here.valid.any()
