"""Random K and V for requests without a prefill server, for benchmarks and tests.

SGLang's fake transfer leaves a request's pages unwritten: zeros, or another request's data. Then all pages score alike,
and a request's output depends on the pages' previous owners.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.stores import HostPages, as_words
from sglang_scout.worker.host_memory import MOST_THREADS

_NOISE_PAGES = 1021  # a prime: no period of a prompt's pages aligns with that of the noise


class DummyKV:
    """Fills pages with noise that depends only on the prompt and the position.

    Args:
        host: the pages to fill.
    """

    def __init__(self, host: HostPages) -> None:
        self._host = host
        page = host.k[0].shape[1:]
        noise = torch.randn((_NOISE_PAGES, *page), generator=torch.Generator().manual_seed(0))
        self._noise = as_words(noise.to(host.k[0].dtype))

    def fill(self, pages: npt.NDArray[np.int64], prompt: Sequence[int]) -> None:
        """K and V of all layers are standard normal; previous users of the pages have ended.

        Args:
            pages: ``[N]`` of the prompt, the partly filled last one included.
            prompt: its token ids.
        """
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a step of the pages' previous owner may still append to them
        seed = zlib.crc32(np.asarray(prompt, np.int64).tobytes())
        where = pages.tolist()

        def fill_plane(job: tuple[torch.Tensor, int]) -> None:
            plane, first = as_words(job[0]), job[1]
            for position, page in enumerate(where):
                plane[page] = self._noise[(first + position * 7) % _NOISE_PAGES]

        jobs = [(plane, seed + i) for i, plane in enumerate((*self._host.k, *self._host.v))]
        threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
        with ThreadPoolExecutor(threads, "scout-noise") as pool:
            list(pool.map(fill_plane, jobs))  # numpy copies a page without the GIL
