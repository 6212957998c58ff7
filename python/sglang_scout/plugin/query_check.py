"""Checks that queries are predicted from the layers' real input: once, in the first steps of a server.

SGLang passes a layer its input in parts, which differ between releases. A prediction that lacks one looks like a valid
query, and selects the wrong pages.

``doctor`` runs this module: SGLang's own benchmark decodes a token of a tiny random model on the CPU, with a decode
server's hooks and probe.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen3Config

from sglang_scout.engine.ahead import QueryProjector
from sglang_scout.plugin.model import before_layer, decoder_layers, make_projectors

MAX_ERROR = 0.1
"""Relative, over all queries of a layer. Rounding causes up to 0.01, omitting the residual stream about 1."""


class UnexpectedQueryError(RuntimeError):
    """SGLang's query differs from the predicted one, or none was seen."""


class QueryProbe:
    """Compares each layer's query with the output of its projector, of the model's weights, for its own input."""

    def __init__(self, projectors: Sequence[QueryProjector]) -> None:
        self.unseen = dict(enumerate(projectors))  # by layer
        self._predicted: torch.Tensor | None = None

    def layer_input(
        self, layer: int, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> None:
        """As of ``StepEngine.layer_input``."""
        projector = self.unseen.get(layer)
        if projector is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._predicted = projector.finish(projector.start(x, residual), positions)

    def query(self, layer: int, q: torch.Tensor) -> None:
        """The layer's real query ``[B, HQ, D]``.

        Raises:
            UnexpectedQueryError: it differs.
        """
        predicted, self._predicted = self._predicted, None
        if predicted is None:
            return
        finite = q.isfinite().flatten(1).all(1)
        wanted, found = q[finite].float(), predicted[finite].float()
        if not len(wanted):
            return  # KV that was never written
        if not (found - wanted).norm() <= MAX_ERROR * wanted.norm():
            raise UnexpectedQueryError(
                f"--kv-offload: the query of layer {layer} differs from the one predicted from its own input: this "
                "SGLang does not pass layers what sglang-scout expects, and pages would be selected with wrong queries"
                "; install SGLang unmodified, or serve without --kv-offload"
            )
        del self.unseen[layer]


def with_probe(runner: Any) -> QueryProbe:
    """Gives a model runner random weights, and a decode server's hooks of layers and attention."""
    for weight in runner.model.parameters():
        # A layer's output is as large as the residual: an omission of either is detected.
        weight.data.normal_(float(weight.dim() == 1), weight.shape[-1] ** -0.5)
    layers = decoder_layers(runner.model)
    probe = QueryProbe(make_projectors(layers))

    def before_attention(attn: Any, given: tuple[torch.Tensor, ...]) -> None:
        probe.query(attn.layer_id, given[0].view(-1, attn.tp_q_head_num, attn.qk_head_dim))

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(before_layer(index, probe.layer_input), with_kwargs=True)
        layer.self_attn.attn.register_forward_pre_hook(before_attention)
    return probe


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 3}
SIZES = {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 64}
VOCABULARY = 10000  # of the benchmark's tokens
DUMMY = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
SMALL = {"attention_backend": "torch_native", "max_total_tokens": 128, "max_running_requests": 2}


def main() -> None:
    """Prints, last, a JSON object with the mismatch as ``error``, or an empty one."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import ServerArgs

    load, probes, found = one_batch.load_model, [], {}

    def load_model(*args: Any) -> Any:
        loaded = load(*args)
        probes.append(with_probe(loaded[0].torch_runner))
        return loaded

    one_batch.load_model, one_batch.get_tokenizer = load_model, lambda *_, **__: None
    once = one_batch.BenchArgs(batch_size=(2,), input_len=(2,), output_len=(2,), result_filename="")
    with tempfile.TemporaryDirectory() as folder:
        sizes = {**HEADS, **SIZES, "vocab_size": VOCABULARY}
        Qwen3Config(architectures=["Qwen3ForCausalLM"], **sizes).save_pretrained(folder)
        try:
            server = ServerArgs(model_path=folder, disable_cuda_graph=True, **DUMMY, **SMALL)
            one_batch.main(server, once)
            if [probe.unseen for probe in probes] != [{}]:
                raise UnexpectedQueryError(
                    "SGLang decoded, but the queries of some layers were not seen; install SGLang unmodified"
                )
        except UnexpectedQueryError as error:
            found["error"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
