"""Model of the ring's protocol: its memory, and the programs of its threads.

A program is a generator. It yields one access to shared memory at a time, as made by sgl-kernel/src/producer.h and
runtime.cpp, and returns the program that follows with its registers. Stores are held in the thread's store buffer
(total store order, as on x86) until they are drained, at a fence or locked instruction, or when the thread dies. Sleeps
have no timeout here, although they have one in the code: a lost wake-up is a deadlock. There is one exception, which
this search found: an epoch may end, and its wake-up be sent, between the producer's last check of it and its sleep. So
a sleeping producer re-checks the live epoch periodically (kSliceUs). An idle thread goes to sleep; spinning before that
adds no states.

A model may have a bug, a mutation of the protocol that the search must find (``test_ring_model.py``).
"""

from dataclasses import dataclass
from functools import cached_property


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

    def at(self, slot: int, word: int) -> int:
        return LOG + self.log_entries + slot * (self.out + self.all_items) + word

    def log_at(self, number: int) -> int:
        return LOG + number % self.log_entries

    def memory(self) -> tuple:
        memory = [0] * self.at(self.slots, 0)
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

# What a program yields, with what it gets for it.
LOAD = "load"  # a word, or several at once -> its value, or theirs
STORE = "store"  # (word, value), ...
ADD = "add"  # word, number; locked
CHANGE = "change"  # word, function of its value -> the value before; locked
FENCE = "fence"
FUTEX = "futex"  # word, value -> whether the thread falls asleep, as the word has the value; None: whatever it has
ASLEEP = "asleep"  # word, epoch: until the word's sleepers are woken, or if given until the epoch is over
WAKE = "wake"  # word: of each node as many sleepers as it has items
CHOOSE = "choose"  # values -> any of them
COMPUTE = "compute"  # (epoch, post, item), once
END = ("end",)


def settled(model: Model, program, registers: tuple, history: tuple) -> tuple:
    """A thread that was given the values of ``history`` since its program began: program, registers and history after
    the stores that come next, these stores, and what it yields then."""
    stores = ()
    while True:
        running = program(model, *registers)
        try:
            wanted = next(running)
            for value in history:
                wanted = running.send(value)
            while wanted[0] == STORE:
                stores, history = (*stores, *wanted[1:]), (*history, None)
                wanted = running.send(None)
            return program, registers, history, stores, wanted
        except StopIteration as end:
            program, *rest = end.value
            registers, history = tuple(rest), ()


def end(m: Model):
    """Of the producer after its last answer, or of a killed thread."""
    yield END


def post(m: Model, number: int, flight: tuple, last: tuple):
    """Of the producer. ``flight``: records that it has to wait for as (post, epoch), with epoch 0 for a local one;
    ``last``: (slot, (epoch, post)) of the last record in each slot."""
    slot, bug = number % m.slots, m.bug
    claims = [m.at(slot, CLAIM + node) for node in range(m.nodes)]
    if epoch := (yield LOAD, LIVE):
        done, record = (yield LOAD, m.at(slot, DONE)), dict(last).get(slot)
        is_busy = record is not None and record[0] == epoch and done != record
        if is_busy and bug != "busy slot is filled":
            epoch = 0
    if epoch:
        if bug != "slot is not closed":
            yield STORE, *((claim, (number, CLOSED)) for claim in claims)
            yield (FENCE,)
        opened = [(claim, (number, 0)) for claim in claims]
        late = opened[1:] if bug == "claims open late" else []
        yield STORE, (m.at(slot, HEADER), (epoch, number)), (m.at(slot, DATA), number)
        yield STORE, *opened[: len(opened) - len(late)]
        yield STORE, (m.log_at(number), (number, slot)), (HEAD, number), *late
        if bug == "bell without a fence":
            yield STORE, (BELL, number)
        else:
            yield ADD, BELL, 1
        if (yield LOAD, SLEEPERS):
            yield WAKE, BELL
        last = tuple(sorted({**dict(last), slot: (epoch, number)}.items()))
    flight = (*flight, (number, epoch))
    is_full = len(flight) >= m.slots or number == m.records
    return wait if is_full else post, number + 1, flight, last


def wait(m: Model, number: int, flight: tuple, last: tuple):
    """Of the producer, for the first record in flight."""
    (waited, epoch), *later = flight
    done_word, data, waiters = (m.at(waited % m.slots, word) for word in (DONE, DATA, WAITERS))
    following = post if number <= m.records else wait, number, tuple(later), last
    if number > m.records and not later:
        following = (end,)
    if not epoch:
        return following
    done = yield LOAD, done_word
    if done == (epoch, waited) or (m.bug == "any answer is taken" and done != (0, 0)):
        out = m.at(waited % m.slots, m.out)
        rows = yield LOAD, tuple(range(out, out + m.all_items))
        if set(rows) != {(epoch, waited)}:
            raise Violation(f"record {waited} is answered by {rows}")
        return following
    live, kept = yield LOAD, (LIVE, data)
    if live != epoch or (m.gives_up and (yield CHOOSE, False, True)):
        if kept != waited:  # the fallback reads the record
            raise Violation(f"record {waited} is overwritten before its fallback")
        return following
    yield STORE, (waiters, 1)
    yield (FENCE,)
    blind = m.bug == "no second look at done"
    if ((yield LOAD, done_word) == done or blind) and (yield LOAD, LIVE) == epoch:
        if (yield FUTEX, done_word, None if blind else done):
            yield ASLEEP, done_word, epoch
    yield STORE, (waiters, 0)
    return wait, number, flight, last


def idle(m: Model, own: int, epoch: int, cursor: int):
    """Of a thread of node ``own`` that has visited ``cursor`` records."""
    again = idle, own, epoch
    head = yield LOAD, HEAD
    if head != cursor:
        cursor = max(cursor, head - m.log_entries)
        number, slot = yield LOAD, m.log_at(cursor + 1)
        found = number == cursor + 1
        return (visit, own, epoch, cursor, slot, 0) if found else (*again, cursor + 1)
    hurries = m.bug == "head before sleepers"
    if hurries and (yield LOAD, HEAD) != cursor:
        return *again, cursor
    yield ADD, SLEEPERS, 1
    bell = yield LOAD, BELL
    if hurries or (yield LOAD, HEAD) == cursor:
        if (yield FUTEX, BELL, bell):
            yield ASLEEP, BELL, None
    yield ADD, SLEEPERS, -1
    return *again, cursor


def visit(m: Model, own: int, epoch: int, cursor: int, slot: int, turn: int):
    """Take an item of the record in a slot; ``turn``: number of nodes whose items have been seen all claimed."""
    number, again = cursor + 1, (visit, own, epoch, cursor, slot, turn)
    helps = turn + 1 < m.nodes and m.bug != "nobody helps"
    onward = (visit, own, epoch, cursor, slot, turn + 1) if helps else (idle, own, epoch, number)
    word, first = (m.at(slot, CLAIM + n) for n in ((own + turn) % m.nodes, 0))
    tag, item = yield LOAD, word
    if tag != number or item == CLOSED:
        return onward
    seq = yield LOAD, m.at(slot, HEADER)
    is_stale = seq[0] != epoch and m.bug != "epoch is not checked"
    if is_stale or seq[1] != number:
        claim = yield LOAD, first
        if claim[0] != number or claim[1] == CLOSED:
            return onward
        closed = (number, CLOSED) if is_stale else claim
        if (yield CHANGE, first, lambda now: closed if now == claim else now) == claim:
            if not is_stale:
                raise Violation(f"record {number} is refused")
        return again
    if item >= m.items:
        return onward

    def is_free(now: tuple) -> bool:
        return now == (number, item) or (m.bug == "claim has no post" and now[1] == item)

    if m.bug == "claim by load and store":
        yield (FENCE,)
        yield STORE, (word, (number, item + 1))
    elif not is_free((yield CHANGE, word, lambda now: (now[0], item + 1) if is_free(now) else now)):
        return again
    return compute, own, epoch, cursor, slot, turn, item, seq


def compute(
    m: Model, own: int, epoch: int, cursor: int, slot: int, turn: int, item: int, seq: tuple
):
    """Compute an item, write its result and answer the record if it is the last; ``seq``: the header's epoch and
    post."""
    again = visit, own, epoch, cursor, slot, turn
    item += (own + turn) % m.nodes * m.items  # from here on its number within the record
    overwritten = Violation(f"record {seq[1]} is overwritten while it is read")
    if (yield LOAD, m.at(slot, DATA)) != seq[1]:
        raise overwritten
    yield COMPUTE, (*seq, item)
    if (yield LOAD, m.at(slot, DATA)) != seq[1]:
        raise overwritten
    result = m.at(slot, m.out + item), seq
    if m.bug == "done before out" and item == m.all_items - 1:
        yield from _answer(m, slot, seq)
        yield STORE, result
        return again
    yield STORE, result
    tag, count = yield CHANGE, m.at(slot, COUNT), lambda now: _counted(now, seq[1])
    if _counted((tag, count), seq[1])[1] == m.all_items or m.bug == "first finisher announces":
        yield from _answer(m, slot, seq)
    return again


def _counted(count: tuple, number: int) -> tuple:
    return number, count[1] + 1 if count[0] == number else 1


def _answer(m: Model, slot: int, seq: tuple):
    yield STORE, (m.at(slot, DONE), seq)
    if m.bug != "done without a fence":
        yield (FENCE,)
    if (yield LOAD, m.at(slot, WAITERS)):
        yield WAKE, m.at(slot, DONE)
