"""Write quantized checkpoints and their dequantized twins with AutoRound, in a process of its own.

AutoRound changes classes of transformers when it is imported.

    python -m tests.auto_round_writer DENSE OUT
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file


class Export(NamedTuple):
    """A scheme and a format of AutoRound, its options, and what its config says."""

    scheme: str
    format: str
    method: str
    packing: str | None = None
    symmetric: bool = True
    group: int | None = 32
    from_files: bool = False  # without a model; only so are zero points stored as they are


EXPORTS = {
    "gptq": Export("W4A16", "auto_gptq", "gptq"),
    "gptq_8_bits": Export("W8A16", "auto_gptq", "gptq"),
    "awq": Export("W4A16", "auto_awq", "awq", symmetric=False),
    "packed_as_gptq": Export("W4A16", "auto_round", "auto-round", "auto_round:auto_gptq"),
    "packed_with_zero_points": Export(
        "W4A16", "auto_round", "auto-round", "auto_round", symmetric=False, from_files=True
    ),
    "packed_as_awq": Export("W4A16", "auto_round", "auto-round", "auto_round:auto_awq", symmetric=False),
    "mixed_bits": Export("W4A16_MIXED", "auto_round", "auto-round", "auto_round:auto_gptq"),
    "mxfp4": Export("MXFP4", "auto_round", "auto-round", "auto_round:llm_compressor", group=None),
    "mxfp8": Export("MXFP8", "auto_round", "auto-round", "auto_round:llm_compressor", group=None),
}


def main(dense: Path, out: Path) -> None:
    from auto_round import AutoRound

    for name, export in EXPORTS.items():
        options: dict[str, Any] = {} if export.group is None else {"group_size": export.group, "sym": export.symmetric}
        rounding = AutoRound(
            str(dense),
            scheme=export.scheme,
            iters=0,
            disable_opt_rtn=True,
            device_map="cpu",
            disable_model_free=not export.from_files,
            **options,
        )
        made = out / f"{name}-made"
        rounding.quantize_and_save(str(made), format=export.format)
        shutil.move(next(made.rglob("config.json")).parent, out / name)
        weights = _awq_weights(out / name) if "awq" in name else _layer_weights(out / name, export, dense)
        assert weights
        save_twin(dense, out / f"{name}-twin", weights)


def save_twin(dense: Path, twin: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write a copy of a checkpoint with other weights."""
    tensors = load_file(dense / "model.safetensors")
    assert weights.keys() <= tensors.keys()
    shutil.copytree(dense, twin)
    save_file(tensors | weights, twin / "model.safetensors", {"format": "pt"})


def _layer_weights(folder: Path, export: Export, dense: Path) -> dict[str, torch.Tensor]:
    """The weights that AutoRound's layers multiply by: their outputs for each unit vector."""
    from transformers import AutoModelForCausalLM

    copy = folder.with_name(f"{folder.name}-read")
    shutil.copytree(folder, copy)
    (copy / "quantization_config.json").unlink(missing_ok=True)
    if export.method == "gptq":  # transformers' own reader of GPTQ needs a GPU library
        config = json.loads((copy / "config.json").read_text())
        own = config["quantization_config"]
        own |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
        del own["modules_in_block_to_quantize"]
        (copy / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, device_map="cpu")
    columns = {name: weight.shape[-1] for name, weight in load_file(dense / "model.safetensors").items()}
    with torch.no_grad():
        return {
            f"{name}.weight": layer(torch.eye(columns[f"{name}.weight"])).T.float().contiguous()
            for name, layer in _named_layers(model)
        }


def _named_layers(model: Any) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__module__.startswith(("auto_round_extension.torch", "auto_round.experimental.qmodules.mx"))
    ]


def _awq_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that AutoRound's copy of AutoAWQ unpacks."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    tensors = load_file(folder / "model.safetensors")
    stems = [name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")]
    return {
        f"{stem}weight": dequantize_gemm(
            tensors[f"{stem}qweight"], tensors[f"{stem}qzeros"], tensors[f"{stem}scales"], 4, 32
        )
        .T.float()
        .contiguous()
        for stem in stems
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
