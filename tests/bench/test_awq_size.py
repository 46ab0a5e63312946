"""A replica of Mixtral's layers at full width, killed half-way and gone on with: memory and seconds of one layer.

    MOETOOL_BIG=/a/folder/with/15/GB nice -n 10 python -m pytest tests/bench/test_awq_size.py -s

Three layers of random bf16 weights, 8.9 GB in seven shards, and 512 calibration tokens, which is few: what takes
memory does not grow with them, what takes time does. `MOETOOL_BIG_HIDDEN` narrows the layers (4096).
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

HIDDEN = int(os.environ.get("MOETOOL_BIG_HIDDEN", "4096"))
WIDTH, LAYERS, EXPERTS, WORDS = HIDDEN * 7 // 2, 3, 8, 32000
LIMIT_BYTES = 12 * 2**30
FLAGS = "--data all --group 128 --set dtype=bfloat16 --set length=64 --set max_tokens=512 --set grid=5"


def _random_checkpoint(path: Path, tokenizer: Path) -> None:
    """Named and sharded as Mixtral is on the hub."""
    path.mkdir()
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, path)
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // 128,
        "num_key_value_heads": HIDDEN // 512,
        "head_dim": 128,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "vocab_size": WORDS,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}

    def save(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        made = {key: torch.empty(*shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
        for tensor in made.values():
            if tensor.dim() == 1:
                tensor.fill_(1)
            else:
                tensor.normal_(0, 0.02, generator=draw)
        save_file(made, path / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(made, name))

    for layer in range(LAYERS):
        root = f"model.layers.{layer}"
        norms = [f"{root}.{name}_layernorm.weight" for name in ("input", "post_attention")]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (HIDDEN,))
        shapes |= {f"{root}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{root}.self_attn.{name}_proj.weight": (HIDDEN // 4, HIDDEN) for name in "kv"}
        shapes[f"{root}.block_sparse_moe.gate.weight"] = (EXPERTS, HIDDEN)
        for half in range(2):
            for expert in range(4 * half, 4 * half + 4):
                stem = f"{root}.block_sparse_moe.experts.{expert}"
                shapes |= {f"{stem}.{name}.weight": (WIDTH, HIDDEN) for name in ("w1", "w3")}
                shapes[f"{stem}.w2.weight"] = (HIDDEN, WIDTH)
            save(f"model-{2 * layer + half:05d}.safetensors", shapes)
            shapes = {}
    ends = {"model.embed_tokens.weight": (WORDS, HIDDEN), "lm_head.weight": (WORDS, HIDDEN)}
    save("model-ends.safetensors", {**ends, "model.norm.weight": (HIDDEN,)})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _run(command: list[str], resume: Path, kill_after: str | None) -> tuple[int, int, list[str]]:
    """Gives the exit status, the most resident memory, and a line for each layer made; may kill it after one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES,) * 2)
    )
    peak, lines, began = 0, [], time.perf_counter()
    known = {file.name for file in resume.glob("layer-*")}
    status, ticks = Path(f"/proc/{process.pid}/status"), Path(f"/proc/{process.pid}/stat")
    while process.poll() is None:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        peak = max(peak, int(fields.get("VmHWM", "0 kB").split()[0]) * 1024)
        used = sum(map(int, ticks.read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
        for name in sorted({file.name for file in resume.glob("layer-*")} - known):
            known.add(name)
            lines.append(f"{name}: after {time.perf_counter() - began:.0f} s, {used:.0f} s of the processor")
        if kill_after in known:
            process.kill()
        time.sleep(0.2)
    lines.append(f"in all {time.perf_counter() - began:.0f} s")
    return process.wait(), peak, lines


def test_a_layer_of_mixtrals_width(reference: Path) -> None:
    if "MOETOOL_BIG" not in os.environ:
        pytest.skip("MOETOOL_BIG names no folder with 15 GB of room")
    folder = Path(os.environ["MOETOOL_BIG"]) / "moetool-awq"
    folder.mkdir()
    try:
        _random_checkpoint(folder / "model", reference)
        run = "from moetool.cli.main import main; main()"
        command = [sys.executable, "-c", run, "train", "awq_replica", str(folder / "model"), *FLAGS.split()]
        command += ["--out", str(folder / "replica")]
        ended = []
        for after in ("layer-00000.json", None):
            status, peak, lines = _run(command, folder / "replica.resume", after)
            ended.append(status)
            print(f"\n{peak:,} bytes resident at most; {'; '.join(lines)}")
        assert ended == [-9, 0]
        layer_bytes = 2 * (3 * EXPERTS * HIDDEN * WIDTH + 5 * HIDDEN * HIDDEN // 2)
        print(f"a layer has {layer_bytes:,} bytes in bf16")
        assert json.loads((folder / "replica" / "card.json").read_text())["tokens"]["train"] == 512
        assert not (folder / "replica.resume").exists()
    finally:
        shutil.rmtree(folder)
