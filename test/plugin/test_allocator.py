"""The allocator with host lists allocates the same as SGLang's own."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator import paged

from sglang_scout.plugin import allocator

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


class Stock(paged.PagedTokenToKVPoolAllocator):
    """SGLang's own; its Triton kernels replaced by its torch function or a one-line rule."""

    def alloc_extend(self, before, before_cpu, after, after_cpu, last, count):
        pages = (after + SIZE - 1) // SIZE - (before + SIZE - 1) // SIZE
        if not self._has(int(pages.sum())):
            return None
        locations = torch.empty(count, dtype=torch.int64)
        paged.alloc_extend_naive(before, after, last, self.free_pages, locations, SIZE, "cpu")
        self.free_pages = self.free_pages[int(pages.sum()) :]
        return locations

    def alloc_decode(self, lengths, lengths_cpu, last):
        opens = (lengths - 1) % SIZE == 0
        if not self._has(int(opens.sum())):
            return None
        locations = last + 1
        locations[opens] = self.free_pages[: int(opens.sum())] * SIZE
        self.free_pages = self.free_pages[int(opens.sum()) :]
        return locations

    def _has(self, count):
        if self.need_sort and count > len(self.free_pages):
            self.merge_and_sort_free()
        return count <= len(self.free_pages)


def make(kind, need_sort, pages=30, kvcache=None):
    more = {"need_sort": need_sort, "kvcache": kvcache}
    return kind(pages * SIZE, page_size=SIZE, dtype=torch.float32, device="cpu", **more)


class User:
    """Requests on one allocator; the same operations on two must have the same result."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.requests = []  # locations of each

    def alloc(self, number):
        return self._keep(self.allocator.alloc(number // SIZE * SIZE))

    def extend(self, number, prefix=NONE):
        before, after = torch.tensor([len(prefix)]), torch.tensor([len(prefix) + number])
        last = prefix[-1:] if len(prefix) else torch.tensor([-1])
        got = self.allocator.alloc_extend(before, before, after, after, last, number)
        self._keep(prefix if got is None else torch.cat([prefix, got]))
        return got

    def resume(self, number):
        return self.extend(number, self.requests.pop(0)) if self.requests else None

    def decode(self, _):
        lengths = torch.tensor([len(r) + 1 for r in self.requests])
        last = torch.tensor([int(r[-1]) for r in self.requests])
        got = self.allocator.alloc_decode(lengths, lengths, last) if self.requests else None
        if got is not None:
            pairs = zip(self.requests, got, strict=True)
            self.requests = [torch.cat([r, x[None]]) for r, x in pairs]
        return got

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

    def _keep(self, locations):
        if locations is not None and len(locations):
            self.requests.append(locations)
        return locations


@given(OPERATIONS, st.booleans())
def test_hands_out_what_sglang_s_own_does_and_says_so(operations, need_sort):
    ours, theirs = (User(make(k, need_sort)) for k in (allocator.ScoutAllocator, Stock))
    listener = ours.allocator.listener = Listener()
    for operation, number in operations:
        got, expected = (getattr(user, operation)(number) for user in (ours, theirs))
        assert (got is None) == (expected is None)
        if got is not None:
            assert torch.equal(got, expected)
            if operation == "decode":  # the page that each row opened
                opened = [x // SIZE if x % SIZE == 0 else -1 for x in got.tolist()]
                assert ours.allocator.opened.tolist() == opened
        assert ours.allocator.available_size() == theirs.allocator.available_size()
        held = {int(x) // SIZE for r in ours.requests for x in r}
        assert listener.out == held and ours.allocator.used_pages == len(held)


def extend(made, total):
    """A new request of ``total`` tokens."""
    none, end = torch.zeros(1, dtype=torch.int64), torch.tensor([total])
    return made.alloc_extend(none, none, end, end, none - 1, total)


def test_a_transfer_waits_for_a_step_that_may_still_write_a_page(monkeypatch):
    """SGLang launches a step before it knows that the last one has ended some of its requests."""
    waits = []
    monkeypatch.setattr(allocator.ScoutAllocator, "_wait_for_steps", lambda self: waits.append(1))
    made = make(allocator.ScoutAllocator, True)
    made.listener = listener = Listener()
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


def kv_cache(**spec):
    return SimpleNamespace(arena=SimpleNamespace(spec=SimpleNamespace(**spec)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 500), unique=True),
    st.integers(1, 300),
    st.randoms(use_true_random=False),
)
def test_every_beginning_of_the_free_pages_is_of_all_nodes(pages, stripe, random):
    random.shuffle(pages)
    made = allocator.alternate_nodes(torch.tensor(pages, dtype=torch.int64), stripe).tolist()
    assert sorted(made) == sorted(pages)
    left = {node: sum(p // stripe == node for p in pages) for node in {p // stripe for p in pages}}
    taken = dict.fromkeys(left, 0)
    for page in made:
        taken[page // stripe] += 1
        most = max(taken.values())
        for node, count in taken.items():
            assert count >= min(left[node], most - allocator.NODE_RUN_PAGES), "a node lags behind"
    runs = sum(b != a + 1 for a, b in zip(made, made[1:], strict=False))
    gaps = sum(b != a + 1 for a, b in zip(sorted(pages), sorted(pages)[1:], strict=False))
    assert runs <= gaps + len(pages) // allocator.NODE_RUN_PAGES + len(left)


def test_requests_take_pages_of_both_nodes_from_the_first_on():
    one = make(allocator.ScoutAllocator, True, 64, kv_cache(num_nodes=1))
    assert torch.equal(one.free_pages, torch.arange(1, 65)), "the order of SGLang"
    made = make(allocator.ScoutAllocator, True, 256, kv_cache(num_nodes=2, stripe_pages=128))
    made.listener = Listener()
    held = []
    for _ in range(4):
        held.append(extend(made, 32 * SIZE))
        pages = torch.unique(held[-1] // SIZE)
        assert (pages < 128).sum() == 16
    for locations in held[::2]:
        made.free(locations)
    again = [extend(made, 32 * SIZE) for _ in range(6)]  # more than was left: all is re-sorted
    assert made.used_pages == 256 and len(made.listener.out) == 256
    counts = [int((torch.unique(a // SIZE) < 128).sum()) for a in again]
    assert all(8 <= count <= 24 for count in counts), counts
