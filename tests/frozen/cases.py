"""The cases by name: `group subject variant`, and what each runs."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests import families, gguf_models, quantized
from tests.frozen import runs
from tests.frozen.record import Kinds

Case = tuple[str, Callable[[], Kinds]]

_DTYPES = ("float32", "bfloat16")
_RESIDENCIES = ("resident", "lru", "foresight")
_CALL_FORMS = ("dbrx", "deepseek_v3", "gpt_oss", "granitemoe", "jetmoe", "llama4_text", "mixtral", "qwen3_next")
"""One family for each way to call experts."""
_CHANGED = {
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **{"indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_head_dim": 8},
        **{"indexer_kv_heads": 1, "indexer_n_heads": 2},
    }
}
"""Families whose tiny model has only linear layers, while transformers generates with an attention layer's cache."""
_WIDE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
_FEW = {"num_hidden_layers": 2, "num_experts": 4}
_INT = {"type": "int", "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_INT4 = {**_INT, "num_bits": 4, "strategy": "group", "group_size": 32}
_INT8 = {**_INT, "num_bits": 8, "strategy": "channel"}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def _compressed(form: str, weights: dict[str, object]) -> tuple[dict[str, object], quantized.Writer]:
    return quantized.compressed_config(form, weights), quantized.compressed(form, weights)


BLOCK_TYPES = (
    *("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"),
    *("IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
"""Block types of GGUF files."""
FORMS = {
    "fp8-block": (_BLOCK, quantized.fp8_block(128)),
    "fp8-tensor": _compressed("float-quantized", {**_FP8, "strategy": "tensor"}),
    "fp8-channel": _compressed("float-quantized", {**_FP8, "strategy": "channel"}),
    "int8": _compressed("int-quantized", _INT8),
    "int4": _compressed("pack-quantized", _INT4),
    "int4-asymmetric": _compressed("pack-quantized", {**_INT4, "symmetric": False}),
    "nvfp4": _compressed("nvfp4-pack-quantized", _NVFP4),
    "mxfp4": (quantized.compressed_config("mxfp4-pack-quantized", quantized.MXFP4), quantized.mxfp4),
    "gptq": ({**_GPTQ, "desc_act": False}, quantized.gptq(act_order=False, group=32)),
    "gptq-act-order": ({**_GPTQ, "desc_act": True}, quantized.gptq(act_order=True, symmetric=False, group=32)),
    "awq": (_AWQ, quantized.awq(32)),
}
"""Stored forms of qwen3_moe: `quantization_config` and writer."""


def subjects() -> Iterator[tuple[str, Callable[[], Iterator[Case]]]]:
    """For each group and subject, its cases. A model is made before its first case and removed after its last."""
    for family in runs.SERVED_FAMILIES:
        write = partial(_write_family, partial(families.save, **_CHANGED.get(family, {})), family)
        yield f"family {family}", partial(_of_a_model, f"family {family}", write, pooled=family in _CALL_FORMS)
    for family in (name for name, text in families.MULTIMODAL.items() if text not in _CHANGED):
        write = partial(_write_family, families.save_multimodal, family)
        yield f"family {family}", partial(_of_a_model, f"family {family}", write)
    for kind in BLOCK_TYPES:
        yield f"gguf {kind}", partial(_of_stored, f"gguf {kind}", partial(_write_gguf, kind))
    for name in FORMS:
        yield f"form {name}", partial(_of_stored, f"form {name}", partial(_write_form, name))
    yield "form gpt_oss-mxfp4", partial(_of_stored, "form gpt_oss-mxfp4", _write_gpt_oss)
    single = {f"replay {policy}": run for policy, run in runs.replays().items()}
    single |= {"capture reference": runs.capture, "http reference": runs.served_over_http}
    single |= {"cluster edge": runs.edge_cluster, "cluster expert-parallel": runs.expert_parallel}
    for name, run in single.items():
        yield name, partial(iter, [(name, run)])


def _of_a_model(name: str, write: Callable[[Path], Path], *, pooled: bool = False) -> Iterator[Case]:
    """Every residency, with and without prefix reuse, in both types."""
    with _made(write) as path:
        third = runs.a_third(path)
        for dtype in _DTYPES:
            for residency in _RESIDENCIES:
                for reuse in (True, False):
                    run = partial(
                        runs.serve,
                        path,
                        policy="lru" if residency == "resident" else residency,
                        slots=None if residency == "resident" else third,
                        dtype=dtype,
                        prefix_caching=reuse,
                    )
                    yield f"{name} {dtype} {residency} {'reuse' if reuse else 'no-reuse'}", run
            if pooled:
                yield f"{name} {dtype} pool", partial(runs.serve, path, slots=third, dtype=dtype, pooled=True)


def _of_stored(name: str, write: Callable[[Path], Path]) -> Iterator[Case]:
    """All resident, by LRU, and from a pool as on a GPU, in both types."""
    with _made(write) as path:
        third = runs.a_third(path)
        yield f"{name} products", partial(runs.products, path)
        for dtype in _DTYPES:
            yield f"{name} {dtype} resident", partial(runs.serve, path, slots=None, dtype=dtype)
            yield f"{name} {dtype} lru", partial(runs.serve, path, slots=third, dtype=dtype)
            yield f"{name} {dtype} pool", partial(runs.serve, path, slots=third, dtype=dtype, pooled=True)


@contextmanager
def _made(write: Callable[[Path], Path]) -> Iterator[Path]:
    """A model, written into a folder of its own and given the embedded model's tokenizer."""
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        path = write(Path(folder))
        for file in runs.REFERENCE.glob("token*"):
            shutil.copy(file, path if path.is_dir() else path.parent)
        yield path


def _write_family(save: Callable[[str, Path], object], family: str, folder: Path) -> Path:
    save(family, folder)
    return folder


def _write_gguf(kind: str, folder: Path) -> Path:
    types = dict.fromkeys(("gate", "up", "down", "dense"), kind)
    return gguf_models.written("qwen3_moe", folder, types, 512, moe_intermediate_size=256, **{**_WIDE, **_FEW})[0]


def _write_form(name: str, folder: Path) -> Path:
    config, writer = FORMS[name]
    families.save("qwen3_moe", folder / "dense", moe_intermediate_size=256, intermediate_size=512, **_WIDE, **_FEW)
    quantized.quantize(folder / "dense", folder / "m", config, lambda tensor: None if "lm_head" in tensor else writer)
    return folder / "m"


def _write_gpt_oss(folder: Path) -> Path:
    families.save("gpt_oss", folder / "dense", hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    quantized.mxfp4_experts(folder / "dense", folder / "m")
    return folder / "m"
