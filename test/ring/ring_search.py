"""Exhaustive search of all interleavings of the ring's protocol; see ring_model.py."""

from __future__ import annotations

from collections import deque

from ring_model import COUNT, HEAD, LIVE, SLEEPERS, WAITERS, Model, Step, Violation, drained, put
from ring_roles import producer_steps, worker_steps


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
