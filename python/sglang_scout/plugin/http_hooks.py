"""The hook functions of the process that takes in requests; ``hooks.py`` says where and why."""

from __future__ import annotations

from typing import Any


def before_validate_one_request(manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """SGLang answers a ValueError with status 400."""
    size = manager.model_config.vocab_size
    wrong = [token for token in input_ids or () if not 0 <= token < size]
    if wrong:
        raise ValueError(
            f"input_ids holds {wrong[0]}, which is outside the model's vocabulary: ids are 0 to {size - 1}"
        )
