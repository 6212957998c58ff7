"""Which tokens are kept of a joining request: selected among all its older ones, on a thread concurrent with steps.

Line 20 of Deng et al., Algorithm 1, with the queries of the request's first step here.

    boundary t+1   the queries of step t, the request's first, are read back to the host
    boundary t+2   they have arrived: the selection begins
    later          it has ended
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.context_cache import ContextCache, Kept
from sglang_scout.engine.device import Fetching
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.policy.feedback import Feedback

Result = tuple[Kept, npt.NDArray[np.bool_]]
"""Kept tokens, and ``[L, H]`` lists that had no room for all of them."""


class Evaluator:
    """The thread: arguments as of :class:`OlderTokens`; kept tokens are added to ``cache``."""

    def __init__(
        self, feedback: Feedback, cache: ContextCache, host: HostPages, shape: ModelShape
    ) -> None:
        self._feedback, self._host, self._shape = feedback, host, shape
        self.cache = cache
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scout-evaluate")

    def submit(self, queries: torch.Tensor, pages: torch.Tensor, state: int) -> Future[Result]:
        """Select among all tokens of ``pages`` ``[n]``, for ``queries`` ``[L, HQ, D]``."""
        return self._thread.submit(self._select, queries, pages, state)

    def _select(self, queries: torch.Tensor, pages: torch.Tensor, state: int) -> Result:
        kept, scale = self.cache.empty(), self._shape.scale
        was_full = np.zeros(kept.tokens.shape, bool)
        for layer, k in enumerate(self._host.k):
            found = self._feedback.select(state, layer, queries[layer], k, pages, scale)
            heads, tokens = (x.numpy() for x in found)
            was_full |= self.cache.add(kept, np.full_like(heads, layer), heads, tokens)
        return kept, was_full

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class Evaluation:
    """Evaluation of one request.

    Args:
        evaluator: does it.
        queries: ``[L, HQ, D]`` on the device, written by the request's first step.
        pages: older full pages, in which to select.
        state: the request's row of the policy's stores.
    """

    def __init__(
        self, evaluator: Evaluator, queries: torch.Tensor, pages: list[int], state: int
    ) -> None:
        self._evaluator, self._queries = evaluator, queries
        self._pages, self._state = torch.tensor(pages), state
        self._sent: Fetching | None = None
        self._result: Future[Result] | None = None

    def advance(self) -> Result | None:
        """The next stage, at each boundary after the first step; the result once available."""
        if self._sent is None:
            is_cuda = self._queries.is_cuda
            into = [torch.empty(self._queries.shape, pin_memory=True)] if is_cuda else None
            self._sent = Fetching([self._queries], into)
        elif self._result is None:
            queries = torch.from_numpy(self._sent.wait()[0])
            self._result = self._evaluator.submit(queries, self._pages, self._state)
        elif self._result.done():
            return self._result.result()
        return None

    def wait(self) -> None:
        """Wait until it has ended, if it has begun."""
        if self._result is not None:
            self._result.exception()

    def drop(self) -> None:
        """The request has ended early."""
        if self._result is not None and not self._result.cancel():
            release = self._evaluator.cache.release
            self._result.add_done_callback(lambda f: release(f.result()[0]))
