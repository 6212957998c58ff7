"""Model of the ring's protocol as a transition system: its memory, and the steps of its threads.

Every step is one access to shared memory, as made by sgl-kernel/src/producer.h and runtime.cpp, by
the producer, by a worker thread or by the supervisor. Stores are held in the thread's store buffer
(total store order, as on x86) until they are drained, at a fence or locked instruction, or when the
thread dies. Sleeps have no timeout here, although they have one in the code: a lost wake-up is a
deadlock. There is one exception, which this search found: an epoch may end, and its wake-up be sent,
between the producer's last check of it and its sleep. So a sleeping producer re-checks the live
epoch periodically (kSliceUs). An idle thread goes to sleep; spinning before that adds no states.

A model may have a bug, a mutation of the protocol that the search must find (``test_ring_model.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product


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


def producer_steps(step: Step, workers: tuple):
    """Its registers: the post, the in-flight posts as (post, epoch) with epoch 0 for local, the epoch and post of
    the last record in each slot, and the value read or the index."""
    if step.pc in ("live", "busy", "close", "closed", "header", "data", "open"):
        return _fill_slot(step)
    if step.pc in ("log", "head", "bell", "sleepers"):
        return _publish(step, workers)
    return _wait_for_answer(step)


def _posted(step: Step, epoch: int):
    post, flight, last, _ = step.registers
    slot = post % step.m.slots
    if epoch:
        others = ((s, record) for s, record in last if s != slot)
        last = tuple(sorted((*others, (slot, (epoch, post)))))
    flight = (*flight, (post, epoch))
    full = len(flight) >= step.m.slots or post == step.m.records
    return "wait" if full else "live", (post + 1, flight, last, 0)


def _fill_slot(step: Step):
    m, pc = step.m, step.pc
    post, flight, last, at = step.registers
    slot = post % m.slots
    if pc == "live":
        epoch = step.load(LIVE)
        if epoch == 0:
            yield step.go(*_posted(step, 0))
        else:
            yield step.go("busy", (post, flight, last, epoch))
    elif pc == "busy":
        record = dict(last).get(slot)
        done = step.load(m.at(slot, DONE))
        busy = record is not None and record[0] == at and done != record
        if busy and m.bug != "busy slot is filled":
            yield step.go(*_posted(step, 0))
        else:
            yield step.go("header" if m.bug == "slot is not closed" else "close")
    elif pc == "close":
        closed = tuple((m.at(slot, CLAIM + n), (post, CLOSED)) for n in range(m.nodes))
        yield step.go("closed", more=closed)
    elif pc == "closed":
        if not step.buffer:
            yield step.go("header")
    elif pc == "header":
        yield step.store(m.at(slot, HEADER), (at, post), "data")
    elif pc == "data":
        yield step.store(m.at(slot, DATA), post, "open")
    elif pc == "open":
        now = 1 if m.bug == "claims open late" else m.nodes
        opened = tuple((m.at(slot, CLAIM + n), (post, 0)) for n in range(now))
        yield step.go("log", more=opened)


def _publish(step: Step, workers: tuple):
    m, pc = step.m, step.pc
    post, _, _, at = step.registers
    slot = post % m.slots
    if pc == "log":
        yield step.store(m.log_at(post), (post, slot), "head")
    elif pc == "head":
        late = range(1, m.nodes) if m.bug == "claims open late" else ()
        opened = tuple((m.at(slot, CLAIM + n), (post, 0)) for n in late)
        yield step.go("bell", more=((HEAD, post), *opened))
    elif pc == "bell":
        if m.bug == "bell without a fence":
            yield step.store(BELL, post, "sleepers")
        elif not step.buffer:
            yield step.locked(BELL, step.memory[BELL] + 1, "sleepers")
    elif step.load(SLEEPERS) == 0:
        yield step.go(*_posted(step, at))
    else:
        groups = []  # of each node as many as it has items
        for node in range(m.nodes):
            asleep = range(node, m.threads, m.nodes)
            asleep = [i for i in asleep if workers[i][0] == "asleep"]
            groups.append(list(combinations(asleep, min(len(asleep), m.items))))
        for woken in product(*groups):
            yield step.go(*_posted(step, at), woken=sum(woken, ()))


def _finished(step: Step):
    """The next post or wait."""
    post, flight, last, at = step.registers
    if post <= step.m.records:
        return step.go("live", (post, flight[1:], last, at))
    return step.go("wait" if flight[1:] else "over", (post, flight[1:], last, at))


def _wait_for_answer(step: Step):
    m, pc = step.m, step.pc
    if pc == "over":
        return
    post, flight, last, at = step.registers
    number, epoch = flight[0]
    s = number % m.slots
    record = epoch, number
    if pc == "wait":
        done = step.load(m.at(s, DONE))
        if epoch == 0:
            yield _finished(step)
        elif done == record or (m.bug == "any answer is taken" and done != (0, 0)):
            yield step.go("take")
        else:
            yield step.go("lost?", (post, flight, last, done))
    elif pc == "take":
        rows = [step.load(m.at(s, m.out + i)) for i in range(m.all_items)]
        if rows != [record] * m.all_items:
            raise Violation(f"record {number} is answered by {rows}")
        yield _finished(step)
    elif pc == "lost?":
        lost = step.load(LIVE) != epoch
        if lost or m.gives_up:
            # The fallback reads the record.
            if step.load(m.at(s, DATA)) != number:
                raise Violation(f"record {number} is overwritten before its fallback")
            yield _finished(step)
        if not lost:
            yield step.store(m.at(s, WAITERS), 1, "look")
    elif pc == "look":
        if not step.buffer:
            if step.load(m.at(s, DONE)) == at or m.bug == "no second look at done":
                yield step.go("still?")
            else:
                yield step.go("clear", (post, flight, last, s))
    elif pc == "still?":
        lost = step.load(LIVE) != epoch
        yield step.go("clear", (post, flight, last, s)) if lost else step.go("futex")
    elif pc == "futex":
        same = step.memory[m.at(s, DONE)] == at or m.bug == "no second look at done"
        yield step.go("waiting" if same else "clear", (post, flight, last, s))
    elif pc == "waiting":
        if step.memory[LIVE] != epoch:
            yield step.go("clear")
    elif pc == "clear":
        yield step.store(m.at(at, WAITERS), 0, "wait")


def worker_steps(step: Step, own: int, epoch: int):
    """``own``: node of the thread. Its registers: the records it has visited; then the slot, the number of nodes whose
    items it has seen all claimed, the item and the header's epoch and post."""
    if step.pc in ("idle", "entry", "doze", "count", "see bell", "look", "futex", "rise"):
        return _find_record(step)
    if step.pc in ("claim", "read header", "see first", "refuse", "take item"):
        return _claim_item(step, own, epoch)
    return _compute_item(step, own)


def _find_record(step: Step):
    m, pc, cursor = step.m, step.pc, step.registers[0]
    if pc == "idle":
        head = step.load(HEAD)
        if head == cursor:
            yield step.go("doze" if m.bug == "head before sleepers" else "count", (cursor,))
        else:
            yield step.go("entry", (max(cursor, head - m.log_entries),))
    elif pc == "entry":
        number, slot = step.load(m.log_at(cursor + 1))
        found = number == cursor + 1
        yield step.go("claim", (cursor, slot, 0)) if found else step.go("idle", (cursor + 1,))
    elif pc == "doze":  # only with a bug
        yield step.go("count" if step.load(HEAD) == cursor else "idle")
    elif pc == "count":
        if not step.buffer:
            yield step.locked(SLEEPERS, step.memory[SLEEPERS] + 1, "see bell")
    elif pc == "see bell":
        yield step.go("look", (cursor, step.load(BELL)))
    elif pc == "look":
        same = step.load(HEAD) == cursor or m.bug == "head before sleepers"
        yield step.go("futex" if same else "rise")
    elif pc == "futex":
        if not step.buffer:
            same = step.memory[BELL] == step.registers[1]
            yield step.go("asleep" if same else "rise", (cursor,))
    elif pc == "rise":
        if not step.buffer:
            yield step.locked(SLEEPERS, step.memory[SLEEPERS] - 1, "idle", (cursor,))


def _claim_item(step: Step, own: int, epoch: int):
    m, pc = step.m, step.pc
    cursor, slot, turn, *rest = step.registers

    def exhausted():
        helps = turn + 1 < m.nodes and m.bug != "nobody helps"
        return (
            step.go("claim", (cursor, slot, turn + 1)) if helps else step.go("idle", (cursor + 1,))
        )

    word = m.at(slot, CLAIM + (own + turn) % m.nodes)
    if pc == "claim":
        tag, item = step.load(word)
        over = tag != cursor + 1 or item == CLOSED
        yield exhausted() if over else step.go("read header", (cursor, slot, turn, item))
    elif pc == "read header":
        seq = step.load(m.at(slot, HEADER))
        if seq[0] != epoch and m.bug != "epoch is not checked":
            yield step.go("see first", (cursor, slot, turn, "stale"))
        elif seq[1] != cursor + 1:
            yield step.go("see first", (cursor, slot, turn, "refused"))
        elif rest[0] >= m.items:
            yield exhausted()
        else:
            yield step.go("take item", (cursor, slot, turn, rest[0], seq))
    elif pc == "see first":
        tag, item = step.load(m.at(slot, CLAIM))
        over = tag != cursor + 1 or item == CLOSED
        yield exhausted() if over else step.go("refuse", (*step.registers, item))
    elif step.buffer:
        return
    elif pc == "refuse":
        why, item = rest
        first = m.at(slot, CLAIM)
        if step.memory[first] != (cursor + 1, item):
            yield step.go("claim", (cursor, slot, turn))
        elif why == "refused":
            raise Violation(f"record {cursor + 1} is refused")
        else:
            yield step.locked(first, (cursor + 1, CLOSED), "claim", (cursor, slot, turn))
    else:  # take item
        item, there = rest[0], step.memory[word]
        if m.bug == "claim by load and store":
            yield step.store(word, (cursor + 1, item + 1), "compute")
        elif there == (cursor + 1, item):
            yield step.locked(word, (cursor + 1, item + 1), "compute")
        elif m.bug == "claim has no post" and there[1] == item:
            yield step.locked(word, (there[0], item + 1), "compute")
        else:
            yield step.go("claim", (cursor, slot, turn))


def _compute_item(step: Step, own: int):
    m, pc = step.m, step.pc
    if pc in ("asleep", "dead"):
        return
    cursor, slot, turn, item, seq = step.registers
    again = cursor, slot, turn
    early = m.bug == "done before out" and item == m.all_items - 1
    if pc in ("compute", "computed"):
        if step.load(m.at(slot, DATA)) != seq[1]:
            raise Violation(f"record {seq[1]} is overwritten while it is read")
        if pc == "compute":
            item += (own + turn) % m.nodes * m.items  # from here on its number within the record
            if (*seq, item) in step.executed:
                raise Violation(f"item {item} of record {seq[1]} is computed twice")
            done = step.executed | {(*seq, item)}
            yield step.go("computed", (*again, item, seq), executed=done)
        else:
            yield step.go("announce" if early else "write")
    elif pc == "write":
        result = ((m.at(slot, m.out + item), seq),)
        yield step.go("claim", again, more=result) if early else step.go("count rows", more=result)
    elif pc == "count rows":
        if not step.buffer:
            tag, count = step.memory[m.at(slot, COUNT)]
            count = count + 1 if tag == seq[1] else 1
            last = count == m.all_items or m.bug == "first finisher announces"
            to, registers = ("announce", step.registers) if last else ("claim", again)
            yield step.locked(m.at(slot, COUNT), (seq[1], count), to, registers)
    elif pc == "announce":
        yield step.store(m.at(slot, DONE), seq, "fence")
    elif pc == "fence":
        if not step.buffer or m.bug == "done without a fence":
            wakes = (slot,) if step.load(m.at(slot, WAITERS)) else ()
            if m.bug == "done before out":
                yield step.go("write", wakes=wakes)
            else:
                yield step.go("claim", again, wakes=wakes)
