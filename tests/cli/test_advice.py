"""Errors that name an option or a command: following the advice changes the outcome."""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool.trace.foreign.importing import import_trace
from tests import families, foreign, synthetic_routes
from tests.command_line import Run


@dataclass(frozen=True, slots=True)
class Advice:
    """A command that is refused, the advice in its error, and the command that follows it.

    Attributes:
        wrong, right: arguments, of which `{}` stands for the folder of the files.
        prepare: writes the files.
    """

    wrong: str
    advice: str
    right: str
    prepare: Callable[[Path], Any]


def _responses(folder: Path) -> None:
    foreign.write_lines(folder / "r.jsonl", foreign.sglang_native("a"))


def _table(folder: Path) -> None:
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("tok", "lay", "exp"))
        writer.writerows((token, layer, expert) for token in range(3) for layer in range(2) for expert in (1, 2))


def _unsized(folder: Path) -> None:
    _responses(folder)
    settings = {name: value for name, value in foreign.HEADLESS.items() if name != "expert_bytes"}
    import_trace([folder / "r.jsonl"], None, folder / "t", settings=settings)


def _counts(folder: Path) -> None:
    counts = np.random.default_rng(0).integers(1, 9, (2, 4, 8))
    counts[:, 0] = 0
    foreign.save(folder / "s.pt", {"logical_count": torch.from_numpy(counts)})


def _trace(folder: Path) -> None:
    synthetic_routes.write_trace(folder / "t", num_requests=4)


def _unknown_family(folder: Path) -> None:
    _responses(folder)
    numbers = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "num_experts": 8, "num_experts_per_tok": 2}
    more = {"model_type": "kimi_k9", "hidden_size": 8, "moe_intermediate_size": 4, "vocab_size": 64}
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps({**numbers, **more}))


def _shape(folder: Path) -> None:
    families.save("qwen3_moe", folder / "m")
    (folder / "m" / "model.safetensors").unlink()


_FACTS = "--set num_experts=8 --set expert_bytes=1000 --set first_k_dense=1"
_TABLE = "trace import {}/t.csv --set num_experts=8 --set expert_bytes=100 --out {}/t"
_ADVICE = {
    "a missing number": Advice(
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --out {{}}/t",
        "--set top_k=",
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --set top_k=2 --out {{}}/t",
        _responses,
    ),
    "a table of unknown columns": Advice(
        _TABLE,
        "--map layer=COLUMN,expert=COLUMN",
        f"{_TABLE} --map layer=lay,expert=exp,token=tok",
        _table,
    ),
    "layers without counts": Advice(
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --out {}/t",
        "--set moe_layers=1..3",
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --set moe_layers=1..3 --out {}/t",
        _counts,
    ),
    "layers given twice": Advice(
        "trace import {}/s.pt --set top_k=2 --set moe_layers=1..3 --set first_k_dense=1 --out {}/t",
        "give one",
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --set first_k_dense=1 --out {}/t",
        _counts,
    ),
    "counts without tokens": Advice(
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --set first_k_dense=1 --as decode --out {}/t",
        "leave out --as",
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --set first_k_dense=1 --out {}/t",
        _counts,
    ),
    "a fact of the model twice": Advice(
        "trace import {}/r.jsonl --set model={}/m --set top_k=2 --out {}/t",
        "leave out --set top_k",
        "trace import {}/r.jsonl --set model={}/m --out {}/t",
        _unknown_family,
    ),
    "a family that cannot run": Advice(
        "profile {}/m --config-only --out {}/p.json",
        "trace import --set model=PATH",
        "trace import {}/r.jsonl --set model={}/m --out {}/t",
        _unknown_family,
    ),
    "a directory that exists": Advice(
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --set top_k=2 --out {{}}/t",
        "--overwrite",
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --set top_k=2 --out {{}}/t --overwrite",
        _unsized,
    ),
    "bytes for experts of unknown size": Advice(
        "replay --trace {}/t --policy lru --budget 2KB",
        "such as 25%",
        "replay --trace {}/t --policy lru --budget 25%",
        _unsized,
    ),
    "bytes for experts of unknown size, imported again": Advice(
        "replay --trace {}/t --policy lru --budget 5KB",
        "--set expert_bytes=NUMBER",
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --set top_k=2 --out {{}}/t --overwrite",
        _unsized,
    ),
    "a replay without memory": Advice(
        "replay --trace {}/t --policy lru",
        "--budget",
        "replay --trace {}/t --policy lru --budget 25%",
        _trace,
    ),
    "a share of tasks": Advice(
        "trace split {}/t --by task --share 0.5 --out {}/u",
        "--by request",
        "trace split {}/t --by request --share 0.5 --out {}/u",
        _trace,
    ),
    "no trace": Advice(
        "replay --trace {}/none --policy lru --budget 25%",
        "moetool capture MODEL --data NAME --out",
        "capture reference --data arithmetic --max-prompts 1 --max-new-tokens 1 --out {}/none",
        _trace,
    ),
    "a shape without weights": Advice(
        "profile {}/m --out {}/p.json",
        "--config-only",
        "profile {}/m --config-only --seconds 1 --out {}/p.json",
        _shape,
    ),
    "a policy by another name": Advice(
        "replay --trace {}/t --policy lrru --budget 25%",
        "did you mean 'lru'",
        "replay --trace {}/t --policy lru --budget 25%",
        _trace,
    ),
    "several tasks for a format of one": Advice(
        "trace export {}/t --format topk_parquet --out {}/x.parquet",
        "moetool trace split {}/t --by task --out DIR",
        "trace split {}/t --by task --out {}/parts",
        _trace,
    ),
}


@pytest.mark.parametrize("name", _ADVICE)
def test_following_the_advice_changes_the_outcome(name: str, run: Run, tmp_path: Path) -> None:
    one = _ADVICE[name]
    one.prepare(tmp_path)
    code, _, refusal = run(*one.wrong.replace("{}", str(tmp_path)).split())
    assert code != 0 and one.advice.replace("{}", str(tmp_path)) in refusal, refusal
    code, _, err = run(*one.right.replace("{}", str(tmp_path)).split())
    assert code == 0, err
