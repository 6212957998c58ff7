"""Models of which there is a config.json and nothing else."""

import json

import pytest

QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    """model(changes of Qwen3-14B's config; absent: not in it) -> folder."""

    def write(absent=(), **changes):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        config = {k: v for k, v in (QWEN3_14B | changes).items() if k not in absent}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write
