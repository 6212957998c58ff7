"""All interleavings of producer, worker threads and supervisor on small rings; see ring_model.py."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from ring_model import (
    COUNT,
    HEAD,
    LIVE,
    SLEEPERS,
    WAITERS,
    Model,
    Step,
    Violation,
    drained,
    producer_steps,
    put,
    worker_steps,
)


class Search:
    """All reachable states; raises Violation at the first bad one."""

    def __init__(self, model: Model) -> None:
        self.m = model

    def start(self) -> tuple:
        """A state: (memory, producer, workers, supervisor, executed)."""
        producer = ("live", (1, (), (), 0), ())
        workers = tuple(("idle", (0,), ()) for _ in range(self.m.threads))
        return self.m.memory(), producer, workers, ("up", 1, self.m.deaths), frozenset()

    def run(self) -> int:
        """Visits all states. Returns their number."""
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
        """(label, successor state, whether the step is optional)"""
        memory, producer, workers, supervisor, executed = state

        def after(label, results, replace):
            for mem, thread, wakes, woken, done in results:
                new_producer, new_workers = replace(thread)
                if any(new_producer[0] == "waiting" and new_producer[1][3] == s for s in wakes):
                    new_producer = ("clear", *new_producer[1:])
                if woken:
                    new_workers = tuple(
                        ("rise", *w[1:]) if i in woken else w for i, w in enumerate(new_workers)
                    )
                yield label, (mem, new_producer, new_workers, supervisor, done), False

        for mem, thread in drained(memory, producer):
            yield "producer drains", (mem, thread, workers, supervisor, executed), False
        steps = producer_steps(Step(self.m, memory, producer, executed), workers)
        yield from after(f"producer {producer[0]}", steps, lambda t: (t, workers))
        for i, worker in enumerate(workers):

            def replace(t, i=i):
                return producer, workers[:i] + (t,) + workers[i + 1 :]

            for mem, thread in drained(memory, worker):
                yield f"{i} drains", (mem, *replace(thread), supervisor, executed), False
            step = Step(self.m, memory, worker, executed)
            steps = worker_steps(step, i % self.m.nodes, supervisor[1])
            yield from after(f"{i} {worker[0]}", steps, replace)
        yield from self.supervisor_steps(state)

    def supervisor_steps(self, state: tuple):
        m = self.m
        memory, producer, workers, (pc, epoch, deaths), executed = state

        def killed():
            """The state after a kill: buffered stores of killed threads drain; they take no further steps."""
            mem = memory
            for _, _, buffer in workers:
                for word, value in buffer:
                    mem = put(mem, word, value)
            return mem, producer, tuple(("dead", (0,), ()) for _ in workers)

        if pc == "up":
            if deaths > 0:
                # It dies and that is detected, or it is abandoned first and killed afterwards.
                after = ("retire", epoch, deaths - 1), executed
                yield "dies", (*killed(), *after), True
                yield "is given up", (memory, producer, workers, *after), True
        elif pc == "retire":
            next_pc = ("tell", epoch, deaths)
            yield pc, (put(memory, LIVE, 0), producer, workers, next_pc, executed), False
        elif pc == "tell":
            waits = producer[0] == "waiting" and memory[m.at(producer[1][3], WAITERS)] != 0
            woken = ("clear", *producer[1:]) if waits else producer
            yield pc, (memory, woken, workers, ("kill", epoch, deaths), executed), False
        elif pc == "kill":
            yield pc, (*killed(), ("start", epoch, deaths), executed), False
        elif pc == "start":
            mem = put(memory, SLEEPERS, 0)
            for slot in range(m.slots):  # counters are process-local
                mem = put(mem, m.at(slot, COUNT), (0, 0))
            fresh = tuple(("idle", (memory[HEAD],), ()) for _ in workers)
            yield pc, (mem, producer, fresh, ("announce", epoch + 1, deaths), executed), False
        elif pc == "announce":
            next_pc = ("up", epoch, deaths)
            yield pc, (put(memory, LIVE, epoch), producer, workers, next_pc, executed), False


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
