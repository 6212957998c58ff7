"""Random K and V for requests without a prefill server, for benchmarks and tests.

SGLang's fake transfer leaves a request's pages unwritten: zeros, or another request's data. Then all pages score alike,
and a request's output depends on the pages' previous owners.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.stores import HostPages, as_words

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
        for layer, halves in enumerate(zip(self._host.k, self._host.v, strict=True)):
            k, v = map(as_words, halves)
            row = seed + 2 * layer
            for position, page in enumerate(where):
                k[page] = self._noise[(row + position * 7) % _NOISE_PAGES]
                v[page] = self._noise[(row + position * 7 + _NOISE_PAGES // 2) % _NOISE_PAGES]
