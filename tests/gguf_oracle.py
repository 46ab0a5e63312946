"""GGUF files of tiny models by llama.cpp's converter, with the dense models that they come from.

Weights are exact in float16 and derived from their names. So a model can be made again anywhere, and compared with the
converted file bit by bit. `python -m tests.gguf_oracle LLAMA_CPP FOLDER` converts all of them; the files in
tests/golden/gguf are its output.
"""

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import families

_SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
_LATENT = {"first_k_dense_replace": 1, "q_lora_rank": 16, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.7},
}
_VISION_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("mixtral", {"intermediate_size": 16}),
    "qwen2moe": ("qwen2_moe", {"norm_topk_prob": False}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3vlmoe": ("qwen3_moe", {"norm_topk_prob": True, "rope_parameters": _VISION_ROPE}),
    "olmoe": ("olmoe", {"norm_topk_prob": False, "rms_norm_eps": 1e-5, "intermediate_size": 16}),
    "glm4moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0}),
    "deepseek2-softmax": ("deepseek_v2", {**_LATENT, "norm_topk_prob": False, "topk_method": "group_limited_greedy"}),
    "deepseek2-sigmoid": (
        "deepseek_v3",
        {**_LATENT, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "rope_parameters": _YARN},
    ),
    "deepseek2-lite": ("glm4_moe_lite", {**_LATENT, "routed_scaling_factor": 1.8}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"intermediate_size": 16}),
    "gpt-oss": ("gpt_oss", {"intermediate_size": 32}),
    "minimax-m2": ("minimax_m2", {"intermediate_size": 16, "rotary_dim": 4}),
    "lfm2moe": ("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "qwen35moe": ("qwen3_5_moe_text", {"linear_num_value_heads": 4}),
    "qwen3next": ("qwen3_next", {"linear_num_value_heads": 4}),
    "granitemoe": ("granitemoe", {"intermediate_size": 16, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "dots1": ("dots1", {"norm_topk_prob": True}),
    "ernie4_5-moe": ("ernie4_5_moe", {"moe_num_experts": 4}),
}
"""Family and changes to the config of `tests.families`, by file name."""
_CALLED = {"qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration"}
"""The converter class of a model that is the text part of a larger one."""
_BY_LAYER = {"moe_intermediate_size": 16, "moe_topk": 2, "num_shared_expert": 1}
"""Values that are lists in HunYuan's published config."""


def build(name: str) -> Any:
    """The dense model that a file was converted from."""
    from transformers import AutoModelForCausalLM

    family, changed = MODELS[name]
    config = families.config(family, **{**_SMALL, **changed})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for key, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if tensor.is_floating_point() and "inv_freq" not in key:
            tensor.data.copy_(_numbers(key, tensor))
    return model


def _numbers(name: str, like: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/512 below 1/2; for norms, plus one."""
    bits = np.arange(like.numel(), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 20)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    values = torch.from_numpy(((bits >> np.uint64(40)) % np.uint64(511)).astype(np.float32) - 255) / 512
    one = like.dim() == 1 and name.endswith("norm.weight")
    return values.view(like.shape) + one


def convert(llama_cpp: Path, name: str, to: Path) -> Path:
    """Convert a model by llama.cpp's script, without a tokenizer."""
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    import gguf
    from conversion import ModelBase, get_model_class

    model = build(name)
    folder = to / f"{name}-dense"
    model.save_pretrained(folder)
    kind = get_model_class(_CALLED.get(name, model.config.architectures[0]))

    class Converted(kind):  # type: ignore[misc, valid-type]
        model_arch = kind.model_arch
        no_mtp = True

        def set_vocab(self) -> None:
            self.gguf_writer.add_tokenizer_model("gpt2")
            self.gguf_writer.add_token_list([f"t{i}" for i in range(self.hparams["vocab_size"])])

    file = to / f"{name}.gguf"
    with torch.inference_mode():
        hparams = ModelBase.load_hparams(folder, False)
        if name == "hunyuan-moe":
            hparams |= {key: [value] * 2 for key, value in _BY_LAYER.items()}
        Converted(folder, gguf.LlamaFileType.MOSTLY_F16, file, eager=True, hparams=hparams).write()
    return file


def split(whole: Path, to: Path) -> list[Path]:
    """Split a model's GGUF file in three: `m-00001-of-00003.gguf` and so on."""
    import gguf

    reader = gguf.GGUFReader(whole)
    files = [to / f"m-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for number, file in enumerate(files):
        writer = gguf.GGUFWriter(file, "qwen3moe")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kinds = field.types
                writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::3]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


if __name__ == "__main__":
    for made in sys.argv[3:] or MODELS:
        print(convert(Path(sys.argv[1]), made, Path(sys.argv[2])))
