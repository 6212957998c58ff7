"""All interleavings of the words about int8 copies, on one page: the rules of page_copies.h step by step.

The page is given away. Each time its content, in two halves, is written, the page becomes final, or is
used without, and a record asks for it: idle worker threads serve it, both at once, or else the caller. The
producer waits for the answers or gives them up at any time; then threads are late. The worker may be
killed at any time. What must hold: an answer that somebody waits for has both halves of the content that
was asked for. Every built-in bug breaks that.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

NONE, WRITING, READY = range(3)
CALLER = 0
VERSIONS = 2  # contents that the page gets
LIVES = 2


class Task(NamedTuple):
    """What a thread does: ``at`` is its next step; the rest it has read so far."""

    at: str
    version: int  # asked for
    waited: bool  # somebody waits for the answer
    word: tuple[int, int, int] = (0, 0, NONE)
    generation: int = 0
    read: tuple[int, ...] = ()


class State(NamedTuple):
    producer: str
    version: int
    generation: int  # the page word
    content: tuple[int, int]
    word: tuple[int, int, int]  # the copy word: generation, writer, state
    copy: tuple[int, int]
    epoch: int
    tasks: tuple[Task | None, ...]  # the caller's, then those of worker threads


START = State("fill 0", 1, 0, (0, 0), (0, 0, NONE), (0, 0), 1, (None, None, None))


class Wrong(Exception):
    """An answer that somebody waits for shows something else."""


def put(pair, index, value):
    return (value, pair[1]) if index == 0 else (pair[0], value)


def with_task(state, who, task):
    tasks = list(state.tasks)
    tasks[who] = task
    return state._replace(tasks=tuple(tasks))


def answer(state, who, task, read):
    if task.waited and read != (task.version, task.version):
        raise Wrong(state)
    return with_task(state, who, None)


def step_of_thread(state, who, bug):
    """The state after the next step of a thread."""
    task = state.tasks[who]
    me = CALLER if who == CALLER else state.epoch

    def go(at, **changes):
        return with_task(state, who, task._replace(at=at, **changes))

    if task.at == "copy word":
        return go("page word", word=state.word)
    if task.at == "page word":
        return go("claim", generation=state.generation)
    if task.at == "claim":
        generation, holder, kind = task.word
        if task.generation % 2 == 0 and bug != "pages need not be final":
            return go("own 0")
        if kind == READY and (generation == task.generation or bug == "any copy will do"):
            return go("use 0")
        mine = holder == CALLER if me == CALLER else holder not in (CALLER, me)
        if kind == WRITING and not mine and bug != "claims are not respected":
            return go("own 0")
        if state.word != task.word:
            return go("own 0")
        claimed = state._replace(word=(task.generation, me, WRITING))
        return with_task(claimed, who, task._replace(at="make 0"))
    kind, _, half = task.at.rpartition(" ")
    half = int(half)
    following = f"{kind} 1"
    if kind == "make":
        read = (*task.read, state.content[half])
        return go("write 0" if half else following, read=read)
    if kind == "write":
        written = state._replace(copy=put(state.copy, half, task.read[half]))
        done = task._replace(at="ready 0", read=()) if half else task._replace(at=following)
        return with_task(written, who, done)
    if kind == "ready":
        generation = task.generation
        if bug == "ready for the page's generation":
            generation = state.generation
        word = generation, me, READY
        return with_task(state._replace(word=word), who, task._replace(at="use 0"))
    source = state.copy if kind == "use" else state.content
    read = (*task.read, source[half])
    return answer(state, who, task, read) if half else go(following, read=read)


def give_up(state):
    """Whoever is still at work is late, but for the caller: its thread is the producer's."""
    return state._replace(
        tasks=(state.tasks[0], *(t and t._replace(waited=False) for t in state.tasks[1:]))
    )


def steps_of_producer(state):
    """The states after the producer's next step; it may have a choice."""
    at, version = state.producer, state.version
    if at in ("fill 0", "fill 1"):
        content = put(state.content, int(at[-1]), version)
        following = ["fill 1"] if at[-1] == "0" else ["final", "ask"]
        return [state._replace(content=content, producer=p) for p in following]
    if at == "final":
        return [state._replace(generation=state.generation + 1, producer="ask")]
    if at == "ask":
        task = Task("copy word", version, True)
        idle = [who for who in (1, 2) if state.tasks[who] is None]
        states = []
        for chosen in (idle, [CALLER]):
            asked = state._replace(producer="wait")
            for who in chosen:
                asked = with_task(asked, who, task)
            if chosen:
                states.append(asked)
        return states
    if any(task and task.waited for task in state.tasks):
        if state.tasks[CALLER]:
            return []
        # Gives up; the caller computes the record, in front of late threads.
        late = give_up(state)
        return [with_task(late, CALLER, Task("copy word", version, True))]
    if version == VERSIONS:
        return []
    released = state.generation + state.generation % 2
    return [
        state._replace(producer="fill 0", version=version + 1, generation=released),
        state._replace(producer="ask"),  # the same content once more
    ]


def death(state):
    """The worker dies and another begins; nobody waits for the old threads any more."""
    asked = any(task and task.waited for task in state.tasks[1:])
    dead = state._replace(epoch=state.epoch + 1, tasks=(state.tasks[0], None, None))
    if asked and state.tasks[CALLER] is None:
        return with_task(dead, CALLER, Task("copy word", state.version, True))
    return dead


def explore(bug=""):
    """Number of states that can be reached. Raises Wrong."""
    seen, open_states = {START}, [START]
    while open_states:
        state = open_states.pop()
        following = steps_of_producer(state)
        following += [step_of_thread(state, who, bug) for who in range(3) if state.tasks[who]]
        if state.epoch < LIVES:
            following.append(death(state))
        for new in following:
            # The two threads are alike.
            first, *threads = new.tasks
            canonical = new._replace(tasks=(first, *sorted(threads, key=repr)))
            if canonical not in seen:
                seen.add(canonical)
                open_states.append(canonical)
    return len(seen)


def test_no_answer_shows_what_was_not_asked_for():
    assert explore() > 10_000


@pytest.mark.parametrize(
    "bug",
    [
        "any copy will do",
        "claims are not respected",
        "pages need not be final",
        "ready for the page's generation",
    ],
)
def test_the_search_finds_a_bug(bug):
    with pytest.raises(Wrong):
        explore(bug)
