"""The hook functions of the process that takes in requests; ``hooks.py`` says where and why."""

from __future__ import annotations

from typing import Any

import msgspec


def before_validate_one_request(manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """SGLang answers a ValueError with status 400. None of its own checks looks at the types of sampling parameters."""
    given = {name: value for name, value in obj.sampling_params.items() if value is not None}
    try:
        sampling = msgspec.convert(given, manager.sampling_params_class)
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling_params: {error}") from None
    for name, bits in (("top_k", 32), ("sampling_seed", 64)):
        value = getattr(sampling, name)
        if value is not None and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise ValueError(f"{name} must be an integer of {bits} bits, got {value}.")
    if input_ids is not None and not len(input_ids):
        raise ValueError("the prompt has no tokens; send one at least")
    size = manager.model_config.vocab_size
    wrong = [token for token in input_ids or () if not 0 <= token < size]
    if wrong:
        raise ValueError(
            f"input_ids holds {wrong[0]}, which is outside the model's vocabulary: ids are 0 to {size - 1}"
        )
