"""Asks a server LongBench's questions over HTTP: retries, several at a time, every answer written when it comes."""

from __future__ import annotations

import http.client
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longbench_answers import AnswerFile  # noqa: E402
from longbench_data import Question  # noqa: E402
from longbench_prompts import Encoded  # noqa: E402

from rows import Row  # noqa: E402
from sglang_scout.cli.progress import Progress  # noqa: E402
from sglang_scout.cli.sglang_http import (  # noqa: E402
    Generation,
    RequestFailed,
    generate_payload,
    http_json,
    parse_generation,
)
from sglang_scout.core.errors import ConfigError  # noqa: E402

FIRST_WAIT_S = 1.0
WAIT_FACTOR = 4.0


@dataclass(frozen=True)
class Served:
    """What the server says about its model; ``context_tokens`` is None where it does not say."""

    model: str
    tokenizer: str
    context_tokens: int | None


def ask_server(base_url: str, timeout_s: float = 30.0) -> Served:
    """Model, tokenizer and context of a server, or of the servers behind a router.

    Raises:
        ConfigError: nobody answers there, or it is no SGLang server.
    """
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {base_url}: no URL; write it as http://HOST:PORT")
    try:
        info = http_json(f"{base_url}/get_model_info", timeout_s=timeout_s)
    except (RequestFailed, OSError, http.client.HTTPException, ValueError) as error:
        raise ConfigError(
            f"--base-url {base_url}: {error}; start the server first, or name one that runs"
        ) from None
    if not isinstance(info, dict) or not isinstance(info.get("model_path"), str):
        raise ConfigError(
            f"--base-url {base_url}: its /get_model_info names no model_path; name an SGLang "
            "server or router"
        )
    return Served(
        info["model_path"],
        str(info.get("tokenizer_path") or info["model_path"]),
        _context_tokens(base_url, timeout_s),
    )


def _context_tokens(base_url: str, timeout_s: float) -> int | None:
    """A server says it in /v1/models; a router leaves it out."""
    try:
        models = http_json(f"{base_url}/v1/models", timeout_s=timeout_s)
        value = models["data"][0].get("max_model_len")
    except (RequestFailed, OSError, http.client.HTTPException, LookupError, TypeError):
        return None
    return value if isinstance(value, int) else None


def ask(
    base_url: str,
    encoded: Encoded,
    max_new_tokens: int,
    sampling: dict[str, Any],
    *,
    tries: int,
    timeout_s: float,
    stop: threading.Event,
) -> Row:
    """One question to its answer row, without set and id. Waits longer after each failed try."""
    row: Row = {
        "status": "failed",
        "reason": "",
        "attempts": 0,
        "prompt_tokens": len(encoded.ids),
        "cut_tokens": encoded.cut_tokens,
        "prompt_sha": encoded.sha,
    }
    payload = generate_payload(encoded.ids, max_new_tokens, sampling=sampling)
    wait_s = FIRST_WAIT_S
    for attempt in range(1, tries + 1):
        row["attempts"] = attempt
        begin = time.monotonic()
        try:
            raw = http_json(f"{base_url}/generate", payload, timeout_s=timeout_s)
            answer = parse_generation(raw, time.monotonic() - begin)
            _check(answer, len(encoded.ids))
        except (RequestFailed, OSError, http.client.HTTPException) as error:
            row["reason"] = f"{type(error).__name__}: {error}"
        except (LookupError, TypeError, AttributeError, ValueError):
            row["reason"] = f"the server's answer is no answer of /generate: {str(raw)[:500]}"
        else:
            return row | {
                "status": "ok",
                "reason": "",
                "text": answer.text,
                "output_tokens": int(answer.raw["meta_info"].get("completion_tokens", 0)),
                "finish_reason": answer.finish_reason,
                "latency_s": round(answer.latency_s, 3),
            }
        if attempt < tries and stop.wait(wait_s):
            break
        wait_s *= WAIT_FACTOR
    return row


def _check(answer: Generation, prompt_tokens: int) -> None:
    if not isinstance(answer.text, str):
        raise TypeError
    # A server told to truncate by itself would answer another question.
    if answer.prompt_tokens != prompt_tokens:
        raise RequestFailed(
            f"the server read {answer.prompt_tokens} of {prompt_tokens} prompt tokens; start it "
            "without --allow-auto-truncate, or give --max-prompt-tokens"
        )


@dataclass
class Tally:
    """State of a run. ``stopped`` says why it ended before all was asked, "" if it did not."""

    total: int
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    in_a_row: int = 0
    last_reason: str = ""
    stopped: str = ""


def run_questions(
    questions: Sequence[Question],
    make_row: Callable[[Question, threading.Event], Row],
    file: AnswerFile,
    *,
    concurrency: int,
    progress: Progress,
) -> Tally:
    """Ask them all, ``concurrency`` at a time, and write each answer when it comes.

    Stops early after so many failures in a row that the server must be gone, and at Ctrl-C, which
    waits for the requests under way; a second Ctrl-C does not.
    """
    tally = Tally(len(questions))
    lock = threading.Lock()
    stop = threading.Event()
    too_many = max(8, 2 * concurrency)

    def work(question: Question) -> None:
        if stop.is_set():
            return
        row = make_row(question, stop)
        if stop.is_set() and row["status"] != "ok":
            return  # its tries were cut short: not asked, rather than failed
        file.add({"set": question.set_name, "id": question.key, **row})
        with lock:
            tally.done += 1
            tally.output_tokens += row.get("output_tokens", 0)
            if row["status"] == "ok":
                tally.in_a_row = 0
            else:
                tally.failed += 1
                tally.in_a_row += 1
                tally.last_reason = row["reason"]
                if tally.in_a_row >= too_many:
                    tally.stopped = f"{tally.in_a_row} questions in a row failed"
                    stop.set()

    begin = time.monotonic()
    with ThreadPoolExecutor(concurrency, "longbench") as pool:
        futures: list[Future[None]] = [pool.submit(work, question) for question in questions]
        try:
            for future, question in zip(futures, questions, strict=True):
                while not _finished(future):
                    progress.update(_state(tally, question.set_name, time.monotonic() - begin))
                future.result()  # a full disk ends the run
        except KeyboardInterrupt:
            tally.stopped = "interrupted"
            _wind_down(pool, stop, progress)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tally


def _finished(future: Future[None]) -> bool:
    try:
        future.exception(timeout=0.5)
    except TimeoutError:
        return False
    return True


def _wind_down(pool: ThreadPoolExecutor, stop: threading.Event, progress: Progress) -> None:
    stop.set()
    progress.say("waiting for the requests under way; Ctrl-C again leaves at once")
    try:
        pool.shutdown(wait=True, cancel_futures=True)
    except KeyboardInterrupt:
        # Every answer is on disk; what is left are threads that wait for sockets.
        os._exit(130)


def _state(tally: Tally, set_name: str, elapsed_s: float) -> str:
    text = f"{set_name}: {tally.done} of {tally.total} answered"
    if tally.failed:
        text += f", {tally.failed} failed"
    if tally.done:
        left_s = elapsed_s / tally.done * (tally.total - tally.done)
        text += f", {tally.output_tokens / elapsed_s:.0f} tokens/s, {left_s / 60:.0f} min left"
    return text
