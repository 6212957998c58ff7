"""The ring's protocol as a transition system, and a search through all its interleavings.

Every step is one access to shared memory, as sgl-kernel/src/producer.h and runtime.cpp make it, by
the producer, by a worker thread or by the supervisor. Stores wait in a buffer of their process's
thread (total store order, as on x86) until they are drained, a fence or a locked instruction comes,
or the thread dies. Sleeps have no timeout here, although they have one in the code: a wake-up that
is lost is a deadlock. With one exception, which this search found: the end of an epoch may come
between the producer's last look at it and its sleep, and its wake-up with it. So a sleeping
producer looks at the live epoch now and then (kSliceUs). A thread that finds nothing to do goes
to sleep; that it may poll first adds no state.

``BUGS`` are changes of the protocol that the search must find.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations, product

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

    Thread i is of node i % nodes. How long a thread leaves another node's items alone is a matter of
    time, so here it takes them whenever it comes to them, and any order is tried.
    """

    slots: int = 1
    records: int = 2
    items: int = 1
    threads: int = 1
    nodes: int = 1
    deaths: int = 0
    gives_up: bool = False  # waits may run into their deadline
    bug: str = ""


class Violation(Exception):
    """What went wrong, and the steps that lead there."""


CLOSED = 99
HEAD, BELL, SLEEPERS, LIVE = range(4)
HEADER, DATA, DONE, WAITERS, COUNT, CLAIM = range(6)  # words of a slot; CLAIM one per node


class Search:
    """All states that can be reached; raises Violation at the first bad one."""

    def __init__(self, model: Model) -> None:
        self.m = model
        self.log_entries = model.slots + 1  # the fewest that ring.h allows
        self.log = 4
        self.slot0 = self.log + self.log_entries
        self.out = CLAIM + model.nodes  # words of a slot, one per item
        self.all_items = model.items * model.nodes
        self.slot_words = self.out + self.all_items
        self.bug = model.bug

    def at(self, slot: int, word: int) -> int:
        return self.slot0 + slot * self.slot_words + word

    # A state: (memory, producer, workers, supervisor, executed). A thread is (pc, registers, store
    # buffer). executed: (epoch, post, item) of every item computed.
    def start(self) -> tuple:
        m = self.m
        memory = [0] * (self.slot0 + m.slots * self.slot_words)
        memory[LIVE] = 1
        for slot in range(m.slots):
            for node in range(m.nodes):
                memory[self.at(slot, CLAIM + node)] = (0, CLOSED)
            memory[self.at(slot, DONE)] = memory[self.at(slot, HEADER)] = (0, 0)
            memory[self.at(slot, COUNT)] = (0, 0)
        for entry in range(self.log_entries):
            memory[self.log + entry] = (-1, 0)
        # Registers: the post, who of the posts is in flight: (post, epoch) with epoch 0 for local.
        producer = ("live", (1, (), (), 0), ())
        workers = tuple(("idle", (0,), ()) for _ in range(m.threads))
        return tuple(memory), producer, workers, ("up", 1, m.deaths), frozenset()

    def run(self) -> int:
        """Visits everything. Returns the number of states."""
        first = self.start()
        parents: dict[tuple, tuple | None] = {first: None}
        queue = deque([first])
        while queue:
            state = queue.popleft()
            moves = 0
            try:
                for label, target, voluntary in self.steps(state):
                    moves += not voluntary
                    if target not in parents:
                        parents[target] = (state, label)
                        queue.append(target)
                if moves == 0 and state[1][0] != "over":
                    raise Violation("deadlock")
            except Violation as e:
                steps = [str(e)]
                while (parent := parents[state]) is not None:
                    state = parent[0]
                    steps.append(parent[1])
                raise Violation("; ".join(reversed(steps))) from None
        return len(parents)

    def steps(self, state: tuple):
        memory, producer, workers, supervisor, executed = state

        def targets(label, results, put):
            # A result: (memory, thread, slots whose producer is woken, threads woken, executed)
            for mem, thread, wakes, woken, done in results:
                new_producer, new_workers = put(thread)
                if any(new_producer[0] == "waiting" and new_producer[1][3] == s for s in wakes):
                    new_producer = ("clear", *new_producer[1:])
                if woken:
                    new_workers = tuple(
                        ("rise", *w[1:]) if i in woken else w for i, w in enumerate(new_workers)
                    )
                yield label, (mem, new_producer, new_workers, supervisor, done), False

        for mem, thread in self.drain(memory, producer):
            yield "producer drains", (mem, thread, workers, supervisor, executed), False
        yield from targets(
            f"producer {producer[0]}",
            self.producer_steps(memory, producer, workers, executed),
            lambda t: (t, workers),
        )
        for i, worker in enumerate(workers):

            def put(t, i=i):
                return producer, workers[:i] + (t,) + workers[i + 1 :]

            for mem, thread in self.drain(memory, worker):
                yield f"{i} drains", (mem, *put(thread), supervisor, executed), False
            node = i % self.m.nodes
            steps = self.worker_steps(memory, worker, node, supervisor[1], executed)
            yield from targets(f"{i} {worker[0]}", steps, put)
        yield from self.supervisor_steps(state)

    # ---- memory ---------------------------------------------------------------------------------

    @staticmethod
    def drain(memory: tuple, thread: tuple):
        pc, registers, buffer = thread
        if buffer:
            (word, value), rest = buffer[0], buffer[1:]
            yield memory[:word] + (value,) + memory[word + 1 :], (pc, registers, rest)

    @staticmethod
    def load(memory: tuple, thread: tuple, word: int):
        for stored, value in reversed(thread[2]):
            if stored == word:
                return value
        return memory[word]

    # ---- producer -------------------------------------------------------------------------------

    def producer_steps(self, memory, thread, workers, executed):
        pc, (post, flight, last, at), buffer = thread
        m, bug = self.m, self.bug
        slot = post % m.slots

        def go(to, registers=(post, flight, last, at), mem=memory, wakes=(), woken=(), buf=buffer):
            return mem, (to, registers, buf), wakes, woken, executed

        def store(word, value, to):
            return go(to, buf=(*buffer, (word, value)))

        def load(word):
            return self.load(memory, thread, word)

        def finished(waited, epoch_of_flight):
            # Which post comes next, or which wait.
            rest = flight[1:]
            if post <= m.records:
                return go("live", (post, rest, last, at))
            return go("wait" if rest else "over", (post, rest, last, at))

        def posted(epoch):
            # `last`: epoch of the last record published in each slot, with its post.
            new_last = last
            if epoch:
                new_last = (*((s, r) for s, r in last if s != slot), (slot, (epoch, post)))
                new_last = tuple(sorted(new_last))
            new_flight = (*flight, (post, epoch))
            full = len(new_flight) >= m.slots or post == m.records
            return "wait" if full else "live", (post + 1, new_flight, new_last, 0)

        if pc == "live":
            epoch = load(LIVE)
            if epoch == 0:
                yield go(*posted(0))
            else:
                yield go("busy", (post, flight, last, epoch))
        elif pc == "busy":
            record = dict(last).get(slot)
            busy = record is not None and record[0] == at and load(self.at(slot, DONE)) != record
            if busy and bug != "busy slot is filled":
                yield go(*posted(0))
            else:
                yield go("header" if bug == "slot is not closed" else "close")
        elif pc == "close":
            closed = tuple((self.at(slot, CLAIM + n), (post, CLOSED)) for n in range(m.nodes))
            yield go("closed", buf=(*buffer, *closed))
        elif pc == "closed":
            if not buffer:
                yield go("header")
        elif pc == "header":
            yield store(self.at(slot, HEADER), (at, post), "data")
        elif pc == "data":
            yield store(self.at(slot, DATA), post, "open")
        elif pc == "open":
            now = 1 if bug == "claims open late" else m.nodes
            opened = tuple((self.at(slot, CLAIM + n), (post, 0)) for n in range(now))
            yield go("log", buf=(*buffer, *opened))
        elif pc == "log":
            yield store(self.log + post % self.log_entries, (post, slot), "head")
        elif pc == "head":
            late = range(1, m.nodes) if bug == "claims open late" else ()
            opened = tuple((self.at(slot, CLAIM + n), (post, 0)) for n in late)
            yield go("bell", buf=(*buffer, (HEAD, post), *opened))
        elif pc == "bell":
            if bug == "bell without a fence":
                yield store(BELL, post, "sleepers")
            elif not buffer:
                yield go("sleepers", mem=memory[:BELL] + (memory[BELL] + 1,) + memory[BELL + 1 :])
        elif pc == "sleepers":
            # Of each node as many as it has items.
            groups = []
            for node in range(m.nodes):
                asleep = range(node, m.threads, m.nodes)
                asleep = [i for i in asleep if workers[i][0] == "asleep"]
                groups.append(list(combinations(asleep, min(len(asleep), m.items))))
            if load(SLEEPERS) == 0:
                yield go(*posted(at))
            else:
                for woken in product(*groups):
                    yield go(*posted(at), woken=sum(woken, ()))
        elif pc == "wait":
            number, epoch = flight[0]
            s = number % m.slots
            done = load(self.at(s, DONE)) if epoch else None
            if epoch == 0:
                yield finished(number, 0)
            elif done == (epoch, number) or (bug == "any answer is taken" and done != (0, 0)):
                yield go("take")
            else:
                yield go("lost?", (post, flight, last, done))
        elif pc == "take":
            number, epoch = flight[0]
            s = number % m.slots
            rows = [load(self.at(s, self.out + i)) for i in range(self.all_items)]
            if rows != [(epoch, number)] * self.all_items:
                raise Violation(f"record {number} is answered by {rows}")
            yield finished(number, epoch)
        elif pc == "lost?":
            number, epoch = flight[0]
            s = number % m.slots
            lost = load(LIVE) != epoch
            if lost or m.gives_up:
                # The fallback reads the record.
                if load(self.at(s, DATA)) != number:
                    raise Violation(f"record {number} is overwritten before its fallback")
                yield finished(number, 0)
            if not lost:
                yield store(self.at(s, WAITERS), 1, "look")
        elif pc == "look":
            number, epoch = flight[0]
            if not buffer:
                again = load(self.at(number % m.slots, DONE)) == at
                if again or bug == "no second look at done":
                    yield go("still?")
                else:
                    yield go("clear", (post, flight, last, number % m.slots))
        elif pc == "still?":
            number, epoch = flight[0]
            lost = load(LIVE) != epoch
            s = number % m.slots
            yield go("clear", (post, flight, last, s)) if lost else go("futex")
        elif pc == "futex":
            s = flight[0][0] % m.slots
            same = memory[self.at(s, DONE)] == at or bug == "no second look at done"
            yield go("waiting" if same else "clear", (post, flight, last, s))
        elif pc == "waiting":
            if memory[LIVE] != flight[0][1]:
                yield go("clear")
        elif pc == "clear":
            yield store(self.at(at, WAITERS), 0, "wait")

    # ---- worker ---------------------------------------------------------------------------------

    def worker_steps(self, memory, thread, own, epoch, executed):
        """``own``: node of the thread. Register 2: of how many nodes it has seen all items claimed."""
        pc, registers, buffer = thread
        m, bug = self.m, self.bug
        cursor = registers[0]

        def go(to, regs=registers, mem=memory, wakes=(), buf=buffer, done=executed):
            return mem, (to, regs, buf), wakes, (), done

        def store(word, value, to):
            return go(to, buf=(*buffer, (word, value)))

        def locked(word, value, to, regs=registers):
            return go(to, regs, mem=memory[:word] + (value,) + memory[word + 1 :])

        def load(word):
            return self.load(memory, thread, word)

        def claim_of(turn):
            return CLAIM + (own + turn) % m.nodes

        def exhausted(slot, turn):
            helps = turn + 1 < m.nodes and bug != "nobody helps"
            return go("claim", (cursor, slot, turn + 1)) if helps else go(*passed)

        passed = ("idle", (cursor + 1,))
        if pc == "idle":
            head = load(HEAD)
            if head == cursor:
                yield go("doze" if bug == "head before sleepers" else "count", (cursor,))
            else:
                yield go("entry", (max(cursor, head - self.log_entries),))
        elif pc == "entry":
            number, slot = load(self.log + (cursor + 1) % self.log_entries)
            yield go(*passed) if number != cursor + 1 else go("claim", (cursor, slot, 0))
        elif pc == "claim":
            _, slot, turn = registers
            tag, item = load(self.at(slot, claim_of(turn)))
            over = tag != cursor + 1 or item == CLOSED
            yield exhausted(slot, turn) if over else go("read header", (cursor, slot, turn, item))
        elif pc == "read header":
            _, slot, turn, item = registers
            seq = load(self.at(slot, HEADER))
            if seq[0] != epoch and bug != "epoch is not checked":
                yield go("see first", (cursor, slot, turn, "stale"))
            elif seq[1] != cursor + 1:
                yield go("see first", (cursor, slot, turn, "refused"))
            elif item >= m.items:
                yield exhausted(slot, turn)
            else:
                yield go("take item", (cursor, slot, turn, item, seq))
        elif pc == "see first":
            _, slot, turn, why = registers
            tag, item = load(self.at(slot, CLAIM))
            over = tag != cursor + 1 or item == CLOSED
            yield exhausted(slot, turn) if over else go("refuse", (*registers, item))
        elif pc == "refuse":
            _, slot, turn, why, item = registers
            word = self.at(slot, CLAIM)
            if not buffer:
                if memory[word] != (cursor + 1, item):
                    yield go("claim", (cursor, slot, turn))
                elif why == "refused":
                    raise Violation(f"record {cursor + 1} is refused")
                else:
                    yield locked(word, (cursor + 1, CLOSED), "claim", (cursor, slot, turn))
        elif pc == "take item":
            _, slot, turn, item, seq = registers
            word = self.at(slot, claim_of(turn))
            if not buffer:
                if bug == "claim by load and store":
                    yield store(word, (cursor + 1, item + 1), "compute")
                elif memory[word] == (cursor + 1, item):
                    yield locked(word, (cursor + 1, item + 1), "compute")
                elif bug == "claim has no post" and memory[word][1] == item:
                    yield locked(word, (memory[word][0], item + 1), "compute")
                else:
                    yield go("claim", (cursor, slot, turn))
        elif pc in ("compute", "computed"):
            _, slot, turn, item, seq = registers
            if load(self.at(slot, DATA)) != seq[1]:
                raise Violation(f"record {seq[1]} is overwritten while it is read")
            if pc == "compute":
                # From here on its number within the record.
                item += (own + turn) % m.nodes * m.items
                if (*seq, item) in executed:
                    raise Violation(f"item {item} of record {seq[1]} is computed twice")
                regs = (cursor, slot, turn, item, seq)
                yield go("computed", regs, done=executed | {(*seq, item)})
            else:
                early = bug == "done before out" and item == self.all_items - 1
                yield go("announce" if early else "write")
        elif pc == "write":
            _, slot, turn, item, seq = registers
            late = bug == "done before out" and item == self.all_items - 1
            to = "claim" if late else "count rows"
            regs = (cursor, slot, turn) if late else registers
            value = (self.at(slot, self.out + item), seq)
            yield go(to, regs, buf=(*buffer, value))
        elif pc == "count rows":
            _, slot, turn, item, seq = registers
            if not buffer:
                word = self.at(slot, COUNT)
                tag, count = memory[word]
                count = count + 1 if tag == seq[1] else 1
                last = count == self.all_items or bug == "first finisher announces"
                regs = registers if last else (cursor, slot, turn)
                yield locked(word, (seq[1], count), "announce" if last else "claim", regs)
        elif pc == "announce":
            _, slot, turn, item, seq = registers
            yield store(self.at(slot, DONE), seq, "fence")
        elif pc == "fence":
            if not buffer or bug == "done without a fence":
                _, slot, turn = registers[:3]
                late = bug == "done before out"
                wakes = (slot,) if load(self.at(slot, WAITERS)) else ()
                regs = registers if late else (cursor, slot, turn)
                yield go("write" if late else "claim", regs, wakes=wakes)
        elif pc == "doze":  # only with a bug
            yield go("count" if load(HEAD) == cursor else "idle")
        elif pc == "count":
            if not buffer:
                yield locked(SLEEPERS, memory[SLEEPERS] + 1, "see bell")
        elif pc == "see bell":
            yield go("look", (cursor, load(BELL)))
        elif pc == "look":
            same = load(HEAD) == cursor or bug == "head before sleepers"
            yield go("futex" if same else "rise")
        elif pc == "futex":
            if not buffer:
                yield go("asleep" if memory[BELL] == registers[1] else "rise", (cursor,))
        elif pc == "rise":
            if not buffer:
                yield locked(SLEEPERS, memory[SLEEPERS] - 1, "idle", (cursor,))

    # ---- supervisor -----------------------------------------------------------------------------

    def supervisor_steps(self, state):
        memory, producer, workers, (pc, epoch, deaths), executed = state

        def wake(thread):
            woken = thread[0] == "waiting" and memory[self.at(thread[1][3], WAITERS)] != 0
            return ("clear", *thread[1:]) if woken else thread

        def dead():
            # What a killed thread has stored comes out; what it would have done does not.
            mem = list(memory)
            for _, _, buffer in workers:
                for word, value in buffer:
                    mem[word] = value
            return tuple(mem), tuple(("dead", (0,), ()) for _ in workers)

        def set_live(value):
            return memory[:LIVE] + (value,) + memory[LIVE + 1 :]

        if pc == "up":
            if deaths > 0:
                # It dies and that is noticed, or it is given up first and killed afterwards.
                mem, gone = dead()
                yield "dies", (mem, producer, gone, ("retire", epoch, deaths - 1), executed), True
                given_up = ("retire", epoch, deaths - 1)
                yield "is given up", (memory, producer, workers, given_up, executed), True
        elif pc == "retire":
            yield pc, (set_live(0), producer, workers, ("tell", epoch, deaths), executed), False
        elif pc == "tell":
            yield pc, (memory, wake(producer), workers, ("kill", epoch, deaths), executed), False
        elif pc == "kill":
            mem, gone = dead()
            yield pc, (mem, producer, gone, ("start", epoch, deaths), executed), False
        elif pc == "start":
            mem = list(memory)
            mem[SLEEPERS] = 0
            for slot in range(self.m.slots):  # counters are the process's own
                mem[self.at(slot, COUNT)] = (0, 0)
            fresh = tuple(("idle", (memory[HEAD],), ()) for _ in workers)
            new = ("announce", epoch + 1, deaths)
            yield pc, (tuple(mem), producer, fresh, new, executed), False
        elif pc == "announce":
            yield pc, (set_live(epoch), producer, workers, ("up", epoch, deaths), executed), False
