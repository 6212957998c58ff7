"""Random K and V for requests without a prefill server, for benchmarks and tests: SGLang's fake transfer leaves a
request's pages as their previous owner did."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.stores import HostPages, as_words
from sglang_scout.worker.host_memory import MOST_THREADS

_NOISE_PAGES = 1021  # a prime: no period of a prompt's pages aligns with that of the noise


class DummyKV:
    """Fills pages of ``host`` with noise that depends only on the prompt and the position."""

    def __init__(self, host: HostPages) -> None:
        self._planes = [as_words(plane) for plane in (*host.k, *host.v)]
        page, dtype = host.k[0].shape[1:], host.k[0].dtype
        noise = torch.randn((_NOISE_PAGES, *page), generator=torch.Generator().manual_seed(0))
        self._noise = as_words(noise.to(dtype))

    def fill(self, pages: npt.NDArray[np.int64], prompt: Sequence[int]) -> None:
        """K and V of all layers are standard normal in ``pages`` ``[N]`` of the tokens ``prompt``, the last one too."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a step of the pages' previous owner may still append to them
        seed = zlib.crc32(np.asarray(prompt, np.int64).tobytes())
        where = pages.tolist()

        def fill_plane(first: int, plane: Any) -> None:
            for position, page in enumerate(where):
                plane[page] = self._noise[(first + position * 7) % _NOISE_PAGES]

        threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
        with ThreadPoolExecutor(threads, "scout-noise") as pool:
            # numpy copies a page without the GIL
            list(pool.map(fill_plane, itertools.count(seed), self._planes))
