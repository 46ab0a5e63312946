"""Files for the commands in advice.toml: the function of each section."""

import csv
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING

from moetool.capture.run import CaptureOptions, capture
from moetool.models.checkpoint import Checkpoint
from moetool.models.shape import shape_of
from moetool.placement.cluster_file import load_cluster
from moetool.placement.plan import bare_plan
from moetool.prompts import gather
from moetool.trace.foreign.importing import import_trace
from moetool.training.fitting import FitOptions
from moetool.training.training import train
from tests import artefacts, families, foreign, synthetic, synthetic_routes
from tests.profiles import compute, flat, make_profile
from tests.synthetic_routes import make_spec


def nothing(folder: Path) -> None:
    (folder / "empty").touch()


def certificates(folder: Path) -> None:
    nothing(folder)
    new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1")
    command = ("openssl", *new, "-keyout", str(folder / "k.pem"), "-out", str(folder / "c.pem"))
    subprocess.run(command, check=True, capture_output=True)


def trace(folder: Path) -> None:
    synthetic_routes.write_trace(folder / "t", num_requests=8)
    synthetic_routes.write_trace(folder / "other", num_requests=4, seed=5, first_prompt=50)


def prompts_only(folder: Path) -> None:
    synthetic_routes.write_trace(folder / "t", num_requests=8, new_tokens=0, keep=("topk", "logits", "embeddings"))


def lost_weights(folder: Path) -> None:
    """A predictor without its weights."""
    trace(folder)
    train("affinity", folder / "t", folder / "p")
    (folder / "p" / "predictor.safetensors").unlink()


def lost_options(folder: Path) -> None:
    """A predictor whose card names a width that no matrix can have."""
    trace(folder)
    train("expert_mlp", folder / "t", folder / "p", fit=FitOptions(max_epochs=1))
    card = folder / "p" / "card.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "options": {"hidden": [10**18]}}))


def profiles(folder: Path) -> None:
    """Of a GPU, of both devices, and of another model."""
    synthetic_routes.write_trace(folder / "t", num_requests=4)
    spec, gpu = make_spec(), compute(device="cuda")
    make_profile(spec, gpu).save(folder / "gpu.json")
    make_profile(spec, gpu, loads={"disk": flat(10), "pinned": flat(5)}).save(folder / "pinned.json")
    make_profile(spec, compute(), gpu, loads={"disk": flat(10), "pinned": flat(5)}).save(folder / "both.json")
    make_profile(make_spec(num_experts=16)).save(folder / "other.json")


def unfinished_capture(folder: Path) -> None:
    stage = folder / "t.stage"
    stage.mkdir()
    (stage / "batch-00000000.arrow").touch()
    (stage / "capture.json").write_text('{"threads": 7, "dtype": "float32"}')


def repeated_prompts(folder: Path) -> None:
    for name in ("d.txt", "e.txt"):
        (folder / name).write_text("a text that is long enough to be a prompt, about one thing or another\n")


def one_split(folder: Path) -> None:
    """A copy of gsm8k without the split that is read by default."""
    row = {"question": "What is three times four, said in words?", "answer": "twelve #### 12"}
    (folder / "g").mkdir()
    (folder / "g" / "train.jsonl").write_text(json.dumps(row) + "\n")


def shape(folder: Path) -> None:
    """A checkpoint without its weights."""
    families.save("qwen3_moe", folder / "m")
    (folder / "m" / "model.safetensors").unlink()


def small_cache_plan(folder: Path) -> None:
    """A plan whose memory holds no whole layer."""
    plan = {**artefacts.CACHE_PLAN(), "slots": 4, "budget_bytes": 4000}
    (folder / "p.json").write_text(json.dumps(plan))
    synthetic.write_trace(folder / "t", artefacts.SPEC)


def migration_plan(folder: Path) -> None:
    two_servers(folder)
    (folder / "m.json").write_text(json.dumps(artefacts.MIGRATION_PLAN()))


def _cluster(file: Path, more: str = "", **memory: str) -> None:
    servers = "".join(f'[[servers]]\nname = "{n}"\n[[servers.gpus]]\nmemory_bytes = "{m}"\n' for n, m in memory.items())
    file.write_text('link_bytes_s = "1MB"\n' + servers + more)


def _plan(folder: Path, name: str, cluster: str, first: int = 4) -> None:
    """A plan that holds the experts below `first` on the first server."""
    spec, machines = make_spec(), load_cluster(folder / cluster)
    placed_GLE = np.zeros((len(machines.gpus), spec.num_layers, spec.num_experts), bool)
    placed_GLE[0, :, :first] = placed_GLE[-1, :, first:] = True
    bare_plan(spec, machines, placed_GLE, "uniform").save(folder / name)


def two_servers(folder: Path) -> None:
    """Traces of two servers; clusters of these, with a link between them, and with a third; plans."""
    for seed, name in enumerate("ab"):
        synthetic_routes.write_trace(folder / name, num_requests=8, seed=seed)
    _cluster(folder / "cluster.toml", a="20kB", b="20kB")
    _cluster(folder / "linked.toml", '[[links]]\nbetween = ["a", "b"]\nbytes_s = "1MB"\n', a="20kB", b="20kB")
    _cluster(folder / "three.toml", a="20kB", b="30kB", c="20kB")
    for name, cluster in (("p.json", "cluster.toml"), ("third.json", "three.toml")):
        _plan(folder, name, cluster)


def responses(folder: Path) -> None:
    foreign.write_lines(folder / "r.jsonl", foreign.sglang_native("a"))


def counts(folder: Path) -> None:
    """SGLang's counts, the first layer without experts."""
    values = np.random.default_rng(0).integers(1, 9, (2, 4, 8))
    values[:, 0] = 0
    foreign.save(folder / "s.pt", {"logical_count": torch.from_numpy(values)})


def imported_counts(folder: Path) -> None:
    counts(folder)
    import_trace([folder / "s.pt"], None, folder / "t", settings={"top_k": 2, "first_k_dense": 1})
    _cluster(folder / "cluster.toml", a="20MB")


def older_counts(folder: Path) -> None:
    imported_counts(folder)
    file = folder / "t" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": 0}))


def unsized(folder: Path) -> None:
    """A trace without the bytes of an expert."""
    responses(folder)
    settings = {name: value for name, value in foreign.HEADLESS.items() if name != "expert_bytes"}
    import_trace([folder / "r.jsonl"], None, folder / "t", settings=settings)


def headless(folder: Path) -> None:
    """A trace without the width of the model."""
    foreign.write_lines(folder / "r.jsonl", foreign.sglang_native("a"), foreign.sglang_native("b"))
    import_trace([folder / "r.jsonl"], None, folder / "t", settings=foreign.HEADLESS)
    _cluster(folder / "cluster.toml", a="20kB", b="20kB")


def of_a_model(folder: Path) -> None:
    """A model, and a trace of it that another program recorded."""
    families.save("qwen3_moe", folder / "m", num_hidden_layers=4, mlp_only_layers=[0], std=0.1)
    foreign.write_lines(folder / "r.jsonl", foreign.sglang_native("a"), foreign.sglang_native("b"))
    settings = {"model": str(folder / "m")}
    import_trace([folder / "r.jsonl"], None, folder / "t", settings=settings, find_model=shape_of)


def of_an_inferred_family(folder: Path) -> None:
    """A trace that another program recorded, of a model whose family no table lists."""
    families.require_known("mistral4")
    families.config("mistral4", num_hidden_layers=4, first_k_dense_replace=1).save_pretrained(folder / "m")
    foreign.write_lines(folder / "r.jsonl", foreign.sglang_native("a"), foreign.sglang_native("b"))
    settings = {"model": str(folder / "m")}
    import_trace([folder / "r.jsonl"], None, folder / "t", settings=settings, find_model=shape_of)


def unknown_family(folder: Path, **changed: Any) -> None:
    responses(folder)
    numbers = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "num_experts": 8, "num_experts_per_tok": 2}
    more = {"model_type": "kimi_k9", "hidden_size": 8, "moe_intermediate_size": 4, "vocab_size": 64}
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps({**numbers, **more, **changed}))


def of_a_config(folder: Path) -> None:
    """A trace of a model that cannot run."""
    unknown_family(folder)
    import_trace([folder / "r.jsonl"], None, folder / "t", settings={"model": str(folder / "m")}, find_model=shape_of)


def of_a_trace(folder: Path) -> None:
    """A trace that takes its model from another one."""
    of_a_config(folder)
    (folder / "t").rename(folder / "first")
    import_trace([folder / "r.jsonl"], None, folder / "t", settings={"model": str(folder / "first")})


def unsupported(folder: Path) -> None:
    unknown_family(folder, model_type="doge")


def dense(folder: Path) -> None:
    unknown_family(folder, model_type="llama", intermediate_size=8, num_attention_heads=2)


def unknown_without_top_k(folder: Path) -> None:
    unknown_family(folder, num_experts_per_tok=None)


def unknown_in_words(folder: Path) -> None:
    unknown_family(folder, num_experts="eight")


def _rows(file: Path, *header: str, rows: Any) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerows(([header] if header else []) + [row if isinstance(row, tuple) else (row,) for row in rows])


def tables(folder: Path) -> None:
    """CSV files whose columns or runs of rows need a word."""
    pairs = [(layer, expert) for layer in (0, 1) for expert in (1, 2)]
    triples = [(layer, expert) for _ in range(2) for layer in (0, 1) for expert in (1, 2, 3)]
    _rows(folder / "t.csv", "tok", "lay", "exp", rows=[(token, *pair) for token in range(3) for pair in pairs])
    _rows(folder / "who.csv", "layer", "who", rows=pairs * 3)
    spots = [(request, spot, *pair) for request in "ab" for spot in range(2) for pair in pairs]
    _rows(folder / "requests.csv", "request", "spot", "layer", "expert", rows=spots)
    _rows(folder / "three.csv", "layer", "expert", rows=triples)
    _rows(folder / "bare.csv", rows=triples)
    hours = [(hour, 0, *pair, 5) for hour in range(2) for pair in pairs]
    _rows(folder / "twice.csv", "hour", "day", "layer", "expert", "count", rows=hours)
    _rows(folder / "counts.csv", "stage", "expert", "count", rows=[(*pair, 5) for pair in pairs])


def fixed_routes(folder: Path) -> None:
    """A trace of a family whose routers cannot be substituted."""
    spec = replace(make_spec(), name="llama4_text:x")
    synthetic_routes.write_trace(folder / "t", spec, num_requests=4, keep=("topk", "logits", "ahead"))


def uneven_layers(folder: Path) -> None:
    """A trace whose layers have different numbers of experts."""
    trace(folder)
    file = folder / "t" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["spec"]["num_experts_L"][-1] += 1
    file.write_text(json.dumps(manifest))


def topk_maps(folder: Path) -> None:
    """A trace with all that maps can hold."""
    keep = ("topk", "logits", "embeddings")
    synthetic_routes.write_trace(folder / "t", num_requests=8, keep=keep)


def short_ahead(folder: Path) -> None:
    synthetic_routes.write_trace(folder / "t", make_spec(6), num_requests=4, keep=("topk", "ahead", "logits"))


def of_the_reference(folder: Path) -> None:
    """Profile and traces of the embedded model, without new tokens, and with them."""
    texts = list(gather.load(["arithmetic"], max_prompts=4))
    for name, new_tokens in (("prompts", 0), ("t", 2)):
        capture("reference", texts, folder / name, CaptureOptions(max_new_tokens=new_tokens, dtype="float32"))
    make_profile(Checkpoint.open("reference").spec, compute(dtype="bfloat16")).save(folder / "c.json")


def headerless(folder: Path) -> None:
    """A table of layer, expert and token without a header."""
    rows = [f"{layer},{expert + layer},{token}" for token in (0, 1) for layer in (0, 1) for expert in (2, 3 + token)]
    (folder / "own.csv").write_text("\n".join(rows) + "\n")


def draft_head(folder: Path) -> None:
    """Colibri's routes of a prompt, in which the draft head's layer has the most rows."""
    rows = [(layer, row) for layer, count in ((4, 2), (5, 2), (6, 3)) for row in range(count)]
    lines = [f"{layer - 4} {row} {layer} 1:0.6250 {row + 2}:0.3750" for layer, row in rows]
    (folder / "draft.txt").write_text("\n".join(lines) + "\n")


def recorder(folder: Path) -> None:
    """SGLang's record of each token, the first layer without experts."""
    foreign.save(folder / "s.pt", foreign.recorder_pack())


def part_of_another(folder: Path) -> None:
    """A model whose language model transformers builds only with speech."""
    CONFIG_MAPPING["qwen3_omni_moe"]().save_pretrained(folder / "m")
