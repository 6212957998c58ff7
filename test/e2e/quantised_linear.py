"""A quantisation for SGLang that plain torch computes: int8 weights, one scale for each output.

Those that SGLang brings need a GPU or AMX. This one is entered in its registry by a plugin, as any
other would be, and named by a checkpoint's ``quantization_config``. No test lives here.
"""

import json
from pathlib import Path

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

NAME = "plain_int8"


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> int8 codes of that shape and float32 steps [out, 1]."""
    step = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / step).round().to(torch.int8), step


class Int8LinearMethod(UnquantizedLinearMethod):
    """The float weight is dropped once it is quantised."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        codes, step = quantise(layer.weight.data)
        del layer.weight
        layer.codes = torch.nn.Parameter(codes, requires_grad=False)
        layer.step = torch.nn.Parameter(step, requires_grad=False)

    def apply(self, layer, x, bias=None):
        weight = (layer.codes.float() * layer.step).to(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)


class Int8Config(QuantizationConfig):
    def __init__(self, config: dict) -> None:
        super().__init__()

    @classmethod
    def from_config(cls, config):
        return cls(config)

    def get_quant_method(self, layer, prefix):
        return Int8LinearMethod() if isinstance(layer, LinearBase) else None

    def get_name(self):
        return NAME

    def get_supported_act_dtypes(self):
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls):
        return 0

    @staticmethod
    def get_config_filenames():
        return []

    def get_scaled_act_names(self):
        return []


def register() -> None:
    """The plugin's entry point."""
    QUANTIZATION_METHODS[NAME] = Int8Config


def install(folder: Path) -> str:
    """Makes ``folder`` a place in PYTHONPATH from which SGLang loads the plugin; the path to add."""
    about = folder / f"{NAME}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{NAME} = {Path(__file__).stem}:register\n"
    )
    return f"{folder}:{Path(__file__).parent}"


def quantised(model: Path, folder: Path) -> Path:
    """The same model as a checkpoint that asks for this quantisation."""
    folder.mkdir()
    for item in model.iterdir():
        if item.name != "config.json":
            (folder / item.name).symlink_to(item)
    changed = json.loads((model / "config.json").read_text())
    changed["quantization_config"] = {"quant_method": NAME}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder
