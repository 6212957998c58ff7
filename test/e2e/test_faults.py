"""One pair of servers under load, aborts, refused requests and a kill. Worker faults: test_worker_faults.py."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import (
    ProcessUsage,
    abort_after,
    random_prompts,
    scheduler_pid,
    wait_until,
)
from servers.sglang_http import RequestFailed, http_json


def usage(servers):
    return ProcessUsage.of(scheduler_pid(servers))


def test_a_chat_and_a_request_too_long(servers):
    chat = {
        "model": "any",
        "messages": [{"role": "user", "content": "What is the capital? " * 60}],
        "max_tokens": 24,
        "temperature": 0,
    }
    answer = http_json(servers.url + "/v1/chat/completions", chat)
    assert answer["choices"][0]["message"]["content"]
    with pytest.raises(RequestFailed):
        servers.generate(random_prompts([60000]), max_new_tokens=4)
    assert servers.generate(random_prompts([300]), max_new_tokens=8)[0].output_ids


def test_a_hundred_requests_with_aborts_leave_nothing(servers):
    chance = random.Random(11)

    def one(prompt):
        if chance.random() < 0.1:
            abort_after(servers, prompt, chance.randrange(8), max_new_tokens=48)
            return 1
        servers.generate([prompt], max_new_tokens=chance.randrange(1, 24))
        return 0

    def run(count, seed):
        lengths = [chance.randrange(1, 900) for _ in range(count)]
        with ThreadPoolExecutor(12) as pool:
            return sum(pool.map(one, random_prompts(lengths, seed=seed)))

    def idle():
        return servers.kv_offload()["host_pages_used"] == 0

    run(40, seed=20)  # caches, thread pools and allocators reach their size
    wait_until("pages of the warm-up are free", idle, 60)
    before = usage(servers)
    aborted = run(100, seed=21)
    assert aborted >= 3
    wait_until("all pages are free", idle, 60)
    after = usage(servers)
    assert after.open_files <= before.open_files + 4, (before, after)
    assert after.threads <= before.threads + 4, (before, after)
    assert after.rss_bytes <= before.rss_bytes + 200 * 2**20, (before, after)
    state = servers.kv_offload()
    assert state["resident_pages"] == 0
    assert state["cpu_pages"] > 0 and state["worker"]["refused"] == 0


def test_killing_the_scheduler_leaves_no_process(servers):
    worker = servers.kv_offload()["worker"]["pid"]
    scheduler = scheduler_pid(servers)
    assert worker in servers.processes() and scheduler in servers.processes()
    os.kill(scheduler, signal.SIGKILL)
    wait_until("the worker has ended", lambda: worker not in servers.processes(), 30)
    assert servers.stop() == {}, "something had to be killed by hand"
