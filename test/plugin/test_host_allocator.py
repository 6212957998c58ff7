"""The allocator whose lists are on the host hands out what SGLang's own would."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

host_allocator = pytest.importorskip("sglang_scout.plugin.host_allocator", reason="needs SGLang")
pool = pytest.importorskip("sglang_scout.plugin.pool", reason="needs SGLang")
from sglang_scout.plugin.request_tables import RequestTables  # noqa: E402

SIZE = 8
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "extend", "continue", "decode", "free", "group", "clear"]),
        st.integers(1, 40),
    ),
    max_size=25,
)


class Listener:
    def __init__(self):
        self.calls = []

    def allocate_pages(self, pages):
        self.calls += [("allocate", page) for page in sorted(pages.tolist())]

    def free_pages(self, pages):
        self.calls += [("free", page) for page in sorted(pages.tolist())]

    def clear(self):
        self.calls.append("clear")


def make(kind, need_sort, num_nodes=1):
    spec = SimpleNamespace(num_nodes=num_nodes, stripe_pages=31 // num_nodes)
    made = kind(
        30 * SIZE, page_size=SIZE, dtype=torch.float32, device="cpu", need_sort=need_sort,
        kvcache=SimpleNamespace(arena=SimpleNamespace(spec=spec)),
    )  # fmt: skip
    made.listener = Listener()
    return made


class User:
    """Requests on one allocator; the same operations on two must have the same outcome."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.requests = []  # locations of each

    def run(self, operation, number):
        a = self.allocator
        if operation == "alloc":
            return self._keep(a.alloc(number // SIZE * SIZE))
        if operation == "extend":
            return self._extend(torch.empty(0, dtype=torch.int64), number)
        if operation == "continue" and self.requests:
            return self._extend(self.requests.pop(0), number)
        if operation == "decode" and self.requests:
            lengths = torch.tensor([len(r) + 1 for r in self.requests])
            last = torch.tensor([int(r[-1]) for r in self.requests])
            got = a.alloc_decode(lengths, lengths, last)
            if got is not None:
                self.requests = [
                    torch.cat([r, x[None]]) for r, x in zip(self.requests, got, strict=True)
                ]
            return got
        if operation in ("free", "group") and self.requests:
            if operation == "group":
                a.free_group_begin()
            for _ in range(min(number % 3 + 1, len(self.requests))):
                a.free(self.requests.pop(0))
            if operation == "group":
                a.free_group_end()
        if operation == "clear":
            a.clear()
            self.requests.clear()
        return None

    def _extend(self, prefix, count):
        before, after = torch.tensor([len(prefix)]), torch.tensor([len(prefix) + count])
        last = prefix[-1:] if len(prefix) else torch.tensor([-1])
        got = self.allocator.alloc_extend(before, before, after, after, last, count)
        if got is None:
            if len(prefix):
                self.requests.insert(0, prefix)
            return None
        return self._keep(torch.cat([prefix, got]))

    def _keep(self, locations):
        if locations is not None and len(locations):
            self.requests.append(locations)
        return locations


@given(OPERATIONS, st.booleans(), st.sampled_from([1, 3]))
def test_hands_out_what_the_other_does(operations, need_sort, num_nodes):
    ours = User(make(host_allocator.HostAllocator, need_sort, num_nodes))
    theirs = User(make(pool.ScoutAllocator, need_sort, num_nodes))
    for operation, number in operations:
        got, expected = ours.run(operation, number), theirs.run(operation, number)
        assert (got is None) == (expected is None)
        if got is not None:
            assert torch.equal(got, expected)
        assert ours.allocator.used_pages == theirs.allocator.used_pages
        assert ours.allocator.available_size() == theirs.allocator.available_size()
    assert {c for c in ours.allocator.listener.calls if c[0] == "free"} == {
        c for c in theirs.allocator.listener.calls if c[0] == "free"
    }


def test_says_which_row_opened_which_page():
    made = make(host_allocator.HostAllocator, True)
    first = made.alloc(2 * SIZE)
    assert first is not None
    lengths = torch.tensor([2 * SIZE + 1, 2 * SIZE])
    got = made.alloc_decode(lengths, lengths, torch.stack([first[-1], first[-2]]))
    assert got.tolist() == [3 * SIZE, int(first[-1])]
    assert made.opened.tolist() == [3, -1]
    assert made.listener.calls == [("allocate", 1), ("allocate", 2), ("allocate", 3)]


def test_tables_follow_what_is_written():
    table = torch.zeros(4, 64, dtype=torch.int32)

    def write(indices, values):
        table[indices] = values

    requests = SimpleNamespace(req_to_token=table, write=write)
    tables = RequestTables(requests, SIZE)
    pages = np.array([5, 2, 9])
    locations = torch.from_numpy((pages[:, None] * SIZE + np.arange(SIZE)).flatten()).int()
    requests.write((2, slice(0, SIZE)), locations[:SIZE])  # a shared prefix
    requests.write((2, slice(SIZE, 20)), locations[SIZE:20])
    requests.write((1, slice(0, 3)), locations[:3])
    tables.open_pages(np.array([1, 2]), np.array([3, 20]), np.array([-1, -1]))
    found, rows = tables.of_step(np.array([4, 21]))
    assert rows.tolist() == [1, 2] and found.tolist() == [[5, 0, 0], [5, 2, 9]]
    requests.write((torch.tensor([1, 2]), torch.tensor([8, 24])), torch.tensor([56, 88]).int())
    tables.open_pages(np.array([2, 1]), np.array([24, 8]), np.array([11, 7]))
    found, rows = tables.of_step(np.array([25, 9]))
    assert rows.tolist() == [2, 1] and found.tolist() == [[5, 2, 9, 11], [5, 7, 0, 0]]
    expected = table[[2, 1], :32:SIZE] // SIZE
    assert (found == expected.numpy())[:, :2].all()
    with pytest.raises(RuntimeError, match="a step of 1 requests, 2 were announced"):
        tables.of_step(np.array([25]))
