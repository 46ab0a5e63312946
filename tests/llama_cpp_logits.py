"""Logits of llama.cpp's own library for the files in tests/golden/gguf.

`python -m tests.llama_cpp_logits DIRECTORY` writes tests/golden/llama_cpp_logits.npz; DIRECTORY holds libllama.so. It
needs the modules of llama-cpp-python. Numbers are float32 there, so that no rounding of llama.cpp's moves a token to
other experts.

llama.cpp runs the attention to chosen blocks of two architectures:

- `minimax-m3`: with flash attention only (`msa_enabled = fa_on && streams_ok` in its models/minimax-m3.cpp), which
  rounds keys and values of layers without an indexer to 16 bits. Otherwise it attends to every token, which differs
  beyond the first `block_size * top_k`.
- `qwen4exp`: always, and to `indexer_top_k + r - 1` tokens (`width` in its models/qwen4exp.cpp): where the query's own
  block has fewer than `r - 1` tokens so far, some of the next best block fill up. transformers, as the published code,
  takes whole blocks and that tail (`block_topk` of Qwen4ExpTextQSAIndexer). So logits are equal in the first
  `indexer_top_k + r - 1` tokens, and later where the tail is full.
"""

import ctypes
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
LOGITS = GOLDEN / "llama_cpp_logits.npz"
TOKENS = (8, 56, 28, 30, 41, 11, 60, 33)
FILES = (
    *("afmoe", "cohere2moe", "dbrx", "deepseek2-ocr", "deepseek2-sigmoid", "deepseek2-softmax", "glm4moe"),
    *("granitehybrid", "jamba", "kimi-linear", "llama", "minimax-m3", "mistral4", "qwen3moe", "qwen4exp", "step35"),
)
"""Files whose headers say what llama.cpp needs."""
MORE_TOKENS = tuple(np.random.default_rng(7).integers(3, 63, 40).tolist())
SPARSE = {"minimax-m3": 1, "qwen4exp": 0}
"""Files with attention to chosen blocks, whose logits of `MORE_TOKENS` are kept too: whether with flash attention."""
_GROUPED = ("deepseek2", "glm4moe", "mistral4")


def in_float32(path: Path, to: Path) -> None:
    """Copy a file in float32, with a tokenizer that llama.cpp takes.

    The tiny configs of families without expert groups have them too, and llama.cpp would follow their headers. That of
    afmoe does not say that scores are normalized, as released ones do.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(to, architecture)
    for field in reader.fields.values():
        kinds, name = field.types, field.name
        stray = ".expert_group" in name and architecture not in _GROUPED
        if not stray and not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    if architecture == "afmoe":
        writer.add_expert_weights_norm(True)
    writer.add_token_merges(["t0 t1"])
    writer.add_token_types([1] * len(reader.fields["tokenizer.ggml.tokens"].contents()))
    writer.add_tokenizer_pre("default")
    for tensor in reader.tensors:
        half = tensor.tensor_type == gguf.GGMLQuantizationType.F16
        data = np.asarray(tensor.data)
        writer.add_tensor(tensor.name, data.astype(np.float32) if half else data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(library: Any, path: Path, tokens: Sequence[int] = TOKENS, flash_attention: int = 0) -> np.ndarray:
    """Logits [T, V] by llama.cpp in float32."""
    of_model = library.llama_model_default_params()
    of_model.n_gpu_layers = 0
    model = library.llama_model_load_from_file(str(path).encode(), of_model)
    options = library.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 64
    options.type_k = options.type_v = 0
    options.flash_attn_type = flash_attention
    context = library.llama_init_from_model(model, options)
    batch = library.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for position, token in enumerate(tokens):
        batch.token[position], batch.pos[position], batch.n_seq_id[position] = token, position, 1
        batch.seq_id[position][0], batch.logits[position] = 0, 1
    assert library.llama_decode(context, batch) == 0
    width = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    found = np.ctypeslib.as_array(library.llama_get_logits(context), shape=(len(tokens), width)).copy()
    library.llama_free(context)
    library.llama_model_free(model)
    return found


if __name__ == "__main__":
    os.environ["LLAMA_CPP_LIB_PATH"] = sys.argv[1]
    import llama_cpp.llama_cpp as library

    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *message: None)
    library.llama_log_set(silent, None)
    library.llama_backend_init()
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            in_float32(GOLDEN / "gguf" / f"{name}.gguf", Path(folder) / f"{name}.gguf")
            made[name] = logits_of(library, Path(folder) / f"{name}.gguf")
            if name in SPARSE:
                made[f"{name} sparse"] = logits_of(library, Path(folder) / f"{name}.gguf", MORE_TOKENS, SPARSE[name])
    np.savez_compressed(LOGITS, **made)
