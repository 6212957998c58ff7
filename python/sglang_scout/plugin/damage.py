"""Requests that own a damaged page end with an error before a token computed from it is returned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

logger = logging.getLogger(__name__)


def fail_owners(
    requests: Sequence[Any],
    damaged: npt.NDArray[np.int64],
    pages_of: Callable[[Any], npt.NDArray[np.int64]],
) -> None:
    """Abort SGLang's running ``requests`` that own a page of ``damaged`` ``[n, 2]``, layers and pages.

    SGLang frees a request's resources when it processes the step, whose token is dropped here.
    """
    for request in requests:
        if request.finished() or request.is_retracted:
            continue
        own = damaged[np.isin(damaged[:, 1], pages_of(request))]
        if not len(own):
            continue
        layer, page = own[0].tolist()
        more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
        message = (
            f"The KV of this request has changed in host memory: page {page} of layer {layer}{more} does not match "
            "its checksum. Send the request again; if it happens again, the machine's memory is at fault."
        )
        logger.error("request %s fails: %s", request.rid, message)
        request.to_finish = FINISH_ABORT(
            message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
        )
        request.finished_len = len(request.output_ids)
        request.skip_radix_cache_insert = True


def forget_cached(tree_cache: Any) -> None:
    """Evict all unused pages from the radix cache, damaged ones among them, so that no other request hits those."""
    tree_cache.evict(EvictParams(num_tokens=tree_cache.evictable_size()))
