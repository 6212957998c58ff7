"""All interleavings of producer, worker threads and supervisor on small rings; see ring_model.py."""

from collections import deque
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, pairwise, product

import pytest

import ring_model as ring
from ring_model import Model, Violation


def put(memory: tuple, word: int, value: object) -> tuple:
    return memory[:word] + (value,) + memory[word + 1 :]


Thread = tuple  # program, registers, values that it was given, stores in its buffer


class Search:
    """All reachable states; raises Violation at the first bad one.

    A state is (memory, threads, supervisor, executed): the producer and the worker's threads; the supervisor's next
    step, the epoch and the deaths to come; and the (epoch, post, item) of every item computed.
    """

    def __init__(self, model: Model) -> None:
        self.m = model
        self.settled = cache(partial(ring.settled, model))

    def run(self) -> int:
        """Visits all states. Returns their number."""
        threads = self.thread(ring.post, 1, (), ()), *self.workers(1, 0)
        first = self.m.memory(), threads, ("up", 1, self.m.deaths), frozenset()
        parents: dict[tuple, tuple | None] = {first: None}
        queue = deque([first])
        while queue:
            state = queue.popleft()
            try:
                moves = list(self.steps(state))
                if not moves and state[1][0][0] is not ring.end:
                    raise Violation("deadlock")
                moves += self.deaths(state)
            except Violation as e:
                steps = [str(e)]
                while (parent := parents[state]) is not None:
                    state = parent[0]
                    steps.append(parent[1])
                raise Violation("; ".join(reversed(steps))) from None
            for label, target in moves:
                if target not in parents:
                    parents[target] = (state, label)
                    queue.append(target)
        return len(parents)

    def thread(self, program, *registers: object, history=(), buffer=()) -> Thread:
        """Before its next access to memory that other threads can see."""
        *thread, stores, wanted = self.settled(program, registers, history)
        buffer += stores
        if wanted[0] == ring.FENCE and not buffer:
            program, registers, history = thread
            return self.thread(program, *registers, history=(*history, None))
        return *thread, buffer

    def given(self, thread: Thread, value: object = None) -> Thread:
        program, registers, history, buffer = thread
        return self.thread(program, *registers, history=(*history, value), buffer=buffer)

    def workers(self, epoch: int, cursor: int) -> tuple[Thread, ...]:
        nodes = (i % self.m.nodes for i in range(self.m.threads))
        return tuple(self.thread(ring.idle, node, epoch, cursor) for node in nodes)

    def wanted(self, thread: Thread) -> tuple:
        return self.settled(*thread[:3])[-1]

    def steps(self, state: tuple):
        """(label, successor state) of all that must happen some time."""
        memory, threads, supervisor, executed = state
        for i, thread in enumerate(threads):

            def after(value=None, memory=memory, woken=(), i=i, thread=thread):
                """The state after a thread was given a value, and others were woken."""
                done, new = executed, self.given(thread, value)
                while self.wanted(new)[0] == ring.COMPUTE:
                    _, item = self.wanted(new)
                    if item in done:
                        raise Violation("item {2} of record {1} is computed twice".format(*item))
                    done, new = done | {item}, self.given(new)
                others = list(threads)
                for j in woken:
                    others[j] = self.given(threads[j])
                others[i] = new
                return memory, tuple(others), supervisor, done

            *running, buffer = thread
            label = f"{i} {thread[0].__name__}"
            if buffer:
                program, registers, history = running
                rest = self.thread(program, *registers, history=history, buffer=buffer[1:])
                drained = *threads[:i], rest, *threads[i + 1 :]
                yield f"{label} drains", (put(memory, *buffer[0]), drained, supervisor, executed)
            kind, *args = self.wanted(thread)
            label += f" {kind}"
            if kind == ring.LOAD:
                own = dict(buffer)
                words = args[0] if isinstance(args[0], tuple) else args
                values = tuple(own.get(word, memory[word]) for word in words)
                yield label, after(values[0] if words is args else values)
            elif kind == ring.CHOOSE:
                yield from ((label, after(value)) for value in args)
            elif kind == ring.WAKE:
                yield from ((label, after(woken=sum(w, ()))) for w in self.wakes(threads, *args))
            elif kind == ring.ASLEEP and args[1] not in (None, memory[ring.LIVE]):
                yield label, after()
            elif not buffer and kind == ring.ADD:
                yield label, after(memory=put(memory, args[0], memory[args[0]] + args[1]))
            elif not buffer and kind == ring.CHANGE:
                word, changed = args
                yield label, after(memory[word], put(memory, word, changed(memory[word])))
            elif not buffer and kind == ring.FUTEX:
                yield label, after(args[1] in (None, memory[args[0]]))
        yield from self.supervise(state)

    def wakes(self, threads: tuple[Thread, ...], word: int):
        """The threads that a wake-up may reach: of each node as many as it has items."""
        groups = [[] for _ in range(self.m.nodes)]
        for i, thread in enumerate(threads):
            if self.wanted(thread)[:2] == (ring.ASLEEP, word):
                groups[i % self.m.nodes].append(i)
        return product(*(combinations(x, min(len(x), self.m.items)) for x in groups))

    def killed(self, state: tuple):
        """Memory and threads after a kill: stores that a thread has made drain. Those in its buffer here may have been
        made, or be about to be made."""
        before, (producer, *workers), *_ = state
        for counts in product(*(range(len(worker[3]) + 1) for worker in workers)):
            memory = before
            for (*_, buffer), count in zip(workers, counts, strict=True):
                for word, value in buffer[:count]:
                    memory = put(memory, word, value)
            yield memory, (producer, *(self.thread(ring.end) for _ in workers))

    def deaths(self, state: tuple):
        """It dies and that is detected, or it is abandoned first and killed afterwards."""
        memory, threads, (step, epoch, deaths), executed = state
        if step == "up" and deaths > 0:
            after = ("retire", epoch, deaths - 1), executed
            yield from (("dies", (*killed, *after)) for killed in self.killed(state))
            yield "is given up", (memory, threads, *after)

    def supervise(self, state: tuple):
        memory, threads, (step, epoch, deaths), executed = state
        following = dict(pairwise(("retire", "tell", "kill", "start", "announce", "up")))
        if step == "up":
            return
        producer, *workers = threads
        if step == "retire":
            memory = put(memory, ring.LIVE, 0)
        elif step == "tell":
            if self.wanted(producer)[0] == ring.ASLEEP:
                producer = self.given(producer)
        elif step == "kill":
            after = (following[step], epoch, deaths), executed
            yield from ((step, (*killed, *after)) for killed in self.killed(state))
            return
        elif step == "start":
            epoch += 1
            workers, memory = self.workers(epoch, memory[ring.HEAD]), put(memory, ring.SLEEPERS, 0)
            for slot in range(self.m.slots):  # counters are process-local
                memory = put(memory, self.m.at(slot, ring.COUNT), (0, 0))
        elif step == "announce":
            memory = put(memory, ring.LIVE, epoch)
        after = following[step], epoch, deaths
        yield step, (memory, (producer, *workers), after, executed)


MODELS = {
    "two threads": Model(slots=1, records=3, items=1, threads=2),
    "two in flight": Model(slots=2, records=3, items=1, threads=1),
    "two in flight, two threads": Model(slots=2, records=2, items=1, threads=2),
    "two items, two threads": Model(slots=1, records=1, items=2, threads=2),
    "deadlines": Model(slots=1, records=3, items=1, threads=1, gives_up=True),
    "a death and deadlines": Model(slots=1, records=3, items=1, threads=1, deaths=1, gives_up=True),
    "a death with two in flight": Model(slots=2, records=3, items=1, threads=1, deaths=1),
    "a death of two threads": Model(slots=1, records=1, items=2, threads=2, deaths=1),
    "two deaths": Model(slots=1, records=2, items=2, threads=1, deaths=2),
    "two nodes": Model(slots=1, records=2, items=1, threads=2, nodes=2),
    "a node without threads": Model(slots=1, records=2, items=2, threads=1, nodes=2),
    "two nodes, in flight": Model(slots=2, records=2, items=1, threads=1, nodes=2, gives_up=True),
    "two nodes and a death": Model(slots=1, records=2, items=1, threads=1, nodes=2, deaths=1),
    "a death of two nodes": Model(slots=1, records=1, items=1, threads=2, nodes=2, deaths=1),
}

# In which model each bug is found, and how.
FOUND = {
    "bell without a fence": ("two threads", "deadlock"),  # sleepers is read before head is out
    "head before sleepers": ("two threads", "deadlock"),
    "no second look at done": ("two threads", "deadlock"),  # after waiters has been set
    "done without a fence": ("two threads", "deadlock"),  # waiters is read before done is out
    "busy slot is filled": ("deadlines", "overwritten while it is read"),
    "epoch is not checked": ("a death and deadlines", "overwritten while it is read"),
    "done before out": ("two threads", "is answered by"),
    "any answer is taken": ("two threads", "is answered by"),  # whatever its number
    "claim has no post": ("two threads", "overwritten while it is read"),
    "claim by load and store": ("two threads", "computed twice"),  # not compare-and-swap
    "first finisher announces": ("two items, two threads", "is answered by"),
    "slot is not closed": ("two threads", "is refused"),  # its old claim is open meanwhile
    "nobody helps": ("a node without threads", "deadlock"),  # a thread leaves other nodes' items
    "claims open late": ("two nodes", "deadlock"),  # after head, but for the first node's
}


@pytest.mark.parametrize("name", MODELS)
def test_no_interleaving_goes_wrong(name):
    """No deadlock (so no lost wake-up), no foreign or torn answer, no duplicate item, no overwriting."""
    assert Search(MODELS[name]).run() > 1000


@pytest.mark.parametrize("bug", FOUND)
def test_a_changed_protocol_is_caught(bug):
    name, what = FOUND[bug]
    with pytest.raises(Violation, match=what):
        Search(replace(MODELS[name], bug=bug)).run()
