"""Model of the ring's protocol as a transition system: its memory, and the steps of its threads.

Every step is one access to shared memory, as made by sgl-kernel/src/producer.h and runtime.cpp, by
the producer, by a worker thread or by the supervisor. Stores are held in the thread's store buffer
(total store order, as on x86) until they are drained, at a fence or locked instruction, or when the
thread dies. Sleeps have no timeout here, although they have one in the code: a lost wake-up is a
deadlock. There is one exception, which this search found: an epoch may end, and its wake-up be sent,
between the producer's last check of it and its sleep. So a sleeping producer re-checks the live
epoch periodically (kSliceUs). An idle thread goes to sleep; spinning before that adds no states.

``BUGS`` are mutations of the protocol that the search must find.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

BUGS = {
    "bell without a fence": "the bell is a plain store: sleepers is read before head is out",
    "head before sleepers": "a thread looks at head, and only then counts itself as a sleeper",
    "no second look at done": "the producer sleeps whatever done is after it set waiters",
    "done without a fence": "waiters is read before done is out",
    "busy slot is filled": "the producer fills a slot that a living worker has not answered",
    "epoch is not checked": "a worker serves records of an earlier epoch",
    "done before out": "done is stored before the rows",
    "any answer is taken": "the producer takes what is in the slot without comparing its number",
    "claim has no post": "the item alone is compared when it is claimed",
    "claim by load and store": "claim is raised without compare-and-swap",
    "first finisher announces": "done is stored after the first item",
    "slot is not closed": "the producer writes the header while the old claim is still open",
    "nobody helps": "a thread goes past a record when the items of its own node are claimed",
    "claims open late": "only the first node's claim is opened before head is out",
}


@dataclass(frozen=True)
class Model:
    """Sizes of a search: slots, records, items of a record on a node, threads, deaths of the worker.

    Thread i is of node i % nodes. The delay before a thread steals another node's items is timing, so here
    it may take them at any time, and all orders are explored.
    """

    slots: int = 1
    records: int = 2
    items: int = 1
    threads: int = 1
    nodes: int = 1
    deaths: int = 0
    gives_up: bool = False  # waits may time out
    bug: str = ""

    @cached_property
    def log_entries(self) -> int:
        return self.slots + 1  # the fewest that ring.h allows

    @cached_property
    def all_items(self) -> int:
        return self.items * self.nodes

    @cached_property
    def out(self) -> int:
        """First of a slot's result words, one per item."""
        return CLAIM + self.nodes

    @cached_property
    def words(self) -> int:
        return self.at(self.slots, 0)

    def at(self, slot: int, word: int) -> int:
        return LOG + self.log_entries + slot * (self.out + self.all_items) + word

    def log_at(self, number: int) -> int:
        return LOG + number % self.log_entries

    def memory(self) -> tuple:
        memory = [0] * self.words
        memory[LIVE] = 1
        for slot in range(self.slots):
            for node in range(self.nodes):
                memory[self.at(slot, CLAIM + node)] = (0, CLOSED)
            for word in (DONE, HEADER, COUNT):
                memory[self.at(slot, word)] = (0, 0)
        for entry in range(self.log_entries):
            memory[self.log_at(entry)] = (-1, 0)
        return tuple(memory)


class Violation(Exception):
    """A violated property, and the steps that lead to it."""


CLOSED = 99
HEAD, BELL, SLEEPERS, LIVE, LOG = range(5)
HEADER, DATA, DONE, WAITERS, COUNT, CLAIM = range(6)  # words of a slot; CLAIM one per node


def put(memory: tuple, word: int, value: object) -> tuple:
    return memory[:word] + (value,) + memory[word + 1 :]


def drained(memory: tuple, thread: tuple) -> Iterable[tuple]:
    """Memory and thread after draining the oldest store of its buffer."""
    pc, registers, buffer = thread
    if buffer:
        yield put(memory, *buffer[0]), (pc, registers, buffer[1:])


class Step:
    """A thread (pc, registers, store buffer) in its current state; the methods create its successor states.

    That is (memory, thread, slots whose producer is woken, threads woken, executed); ``executed`` are the
    (epoch, post, item) of every item computed.
    """

    __slots__ = ("m", "memory", "pc", "registers", "buffer", "executed")

    def __init__(self, model: Model, memory: tuple, thread: tuple, executed: frozenset) -> None:
        self.m, self.memory, self.executed = model, memory, executed
        self.pc, self.registers, self.buffer = thread

    def load(self, word: int):
        for stored, value in reversed(self.buffer):
            if stored == word:
                return value
        return self.memory[word]

    def go(self, to: str, registers=None, memory=None, wakes=(), woken=(), more=(), executed=None):
        """``more``: stores."""
        thread = to, self.registers if registers is None else registers, (*self.buffer, *more)
        memory = self.memory if memory is None else memory
        return memory, thread, wakes, woken, self.executed if executed is None else executed

    def store(self, word: int, value: object, to: str):
        return self.go(to, more=((word, value),))

    def locked(self, word: int, value: object, to: str, registers=None):
        """Only with an empty buffer."""
        return self.go(to, registers, put(self.memory, word, value))
