"""Files of other programs, written by hand from their formats' documentation, not by moetool's exporters.

A model of four layers, the first without experts; E 8, K 2. Request `a` has a prompt of 4 tokens and 3 new ones,
request `b` a prompt of 2 and 2. Engines sample one token more than they forward.
"""

import base64
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.numpy import save_file

from tests.synthetic import make_spec, random_experts

HIDDEN, LAYERS, EXPERTS, TOP_K = 4, 3, 8, 2
PROMPT = {"a": 4, "b": 2}
TOKENS = {"a": 7, "b": 4}
ROUTES = {
    name: random_experts(make_spec(LAYERS, EXPERTS, TOP_K), TOKENS[name], np.random.default_rng(i))
    for i, name in enumerate("ab")
}
SHAPE = {"first_k_dense": 1, "num_experts": EXPERTS, "expert_bytes": 1000}
HEADLESS = {**SHAPE, "top_k": TOP_K, "num_hidden_layers": HIDDEN}
IDS = {"a": [11, 12, 13, 14, 15, 16, 17], "b": [21, 22, 23, 24]}


def hidden_rows(name: str, empty: int = 0) -> np.ndarray:
    """[T, H, K] with the first layer empty."""
    rows = np.full((TOKENS[name], HIDDEN, TOP_K), empty, np.int32)
    rows[:, 1:] = ROUTES[name]
    return rows


def usage(name: str) -> dict[str, int]:
    return {"prompt_tokens": PROMPT[name], "completion_tokens": TOKENS[name] + 1 - PROMPT[name]}


def sglang_native(name: str, rows: np.ndarray | None = None) -> dict[str, Any]:
    """A response of SGLang's /generate."""
    rows = hidden_rows(name) if rows is None else rows
    text = base64.b64encode(rows.astype(np.int32).tobytes()).decode()
    return {"text": "…", "meta_info": {"id": name, **usage(name), "routed_experts": text}}


def sglang_openai(name: str) -> dict[str, Any]:
    """The same from SGLang's OpenAI API."""
    text = sglang_native(name)["meta_info"]["routed_experts"]
    choices = [{"index": 0, "message": {"content": "…"}}]
    return {"id": name, "choices": choices, "usage": usage(name), "sglext": {"routed_experts": text}}


def npy(rows: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, rows)
    return base64.b64encode(stream.getvalue()).decode()


def vllm_response(name: str, rows: np.ndarray | None = None) -> dict[str, Any]:
    """A response of vLLM's completions."""
    rows = hidden_rows(name).astype(np.uint8) if rows is None else rows
    return {"id": name, "choices": [{"index": 0, "text": "…", "routed_experts": npy(rows)}], "usage": usage(name)}


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# Ten slots: in each layer experts 3 and 5 have a second one, and the first eight are permuted.
MAPPING = np.array([[*np.random.default_rng(9 + layer).permutation(EXPERTS), 3, 5] for layer in range(HIDDEN)])
FORWARDS = [
    (1, ["a"] * 4, [0, 1, 2, 3], [4]),
    (2, ["a"], [4], None),
    (3, ["b", "b", "a"], [0, 1, 5], [2, 1]),  # a prompt chunk beside a decode token
    (2, ["a", "b"], [6, 2], None),
    (2, ["b"], [3], None),
]
"""Forwards of the recorder: mode, requests of the tokens, positions, extend_seq_lens."""


def slots_of(experts: np.ndarray, layer: int, turn: int) -> list[int]:
    """Slots of these experts in a layer, alternating between two replicas."""
    found = [np.flatnonzero(MAPPING[layer] == expert) for expert in experts]
    return [int(each[turn % len(each)]) for each in found]


def recorder_records() -> list[dict[str, Any]]:
    """The records of mode per_token, ids physical."""
    records = []
    for number, (mode, names, positions, extend) in enumerate(FORWARDS):
        slots = np.full((HIDDEN, len(names), 8), -1, np.int32)
        count = np.zeros((HIDDEN, MAPPING.shape[1]), np.int32)
        for t, (name, position) in enumerate(zip(names, positions, strict=True)):
            for layer in range(1, HIDDEN):
                slots[layer, t, :TOP_K] = slots_of(ROUTES[name][position, layer - 1], layer, number + t)
                for slot in slots[layer, t, :TOP_K]:
                    count[layer, slot] += 1
        records.append(
            {
                "forward_pass_id": 70 + number,
                "rank": 0,
                "gatherer_key": "primary",
                "input_ids": [IDS[name][position] for name, position in zip(names, positions, strict=True)],
                "positions": positions,
                "extend_seq_lens": extend,
                "forward_mode": mode,
                "topk_ids_of_layer": torch.from_numpy(slots),
                "misc_objects": [],
                "global_physical_count": torch.from_numpy(count),
            }
        )
    return records


def recorder_pack(records: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "records": recorder_records() if records is None else records,
        "last_physical_to_logical_map": torch.tensor(MAPPING),
    }


def counts_by_forward() -> np.ndarray:
    """[W, L, E] of those forwards."""
    counts = np.zeros((len(FORWARDS), LAYERS, EXPERTS), np.int64)
    for w, (_, names, positions, _) in enumerate(FORWARDS):
        for name, position in zip(names, positions, strict=True):
            for layer in range(LAYERS):
                counts[w, layer, ROUTES[name][position, layer]] += 1
    return counts


def save(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def stat_pack() -> dict[str, Any]:
    """Mode stat: a buffer of nine passes, five of them in use."""
    count = np.zeros((9, HIDDEN, EXPERTS), np.int32)
    count[: len(FORWARDS), 1:] = counts_by_forward()
    return {"rank": 0, "logical_count": torch.from_numpy(count), "average_utilization_rate_over_window": None}


def per_pass_packs() -> list[dict[str, Any]]:
    """Mode per_pass, two ranks: the second counted the odd slots."""
    packs = []
    for rank in range(2):
        records = []
        for record in recorder_records():
            count = record["global_physical_count"].clone()
            count[:, 1 - rank :: 2] = 0
            kept = {key: record[key] for key in ("forward_pass_id", "gatherer_key")}
            records.append({**kept, "rank": rank, "global_physical_count": count})
        packs.append(recorder_pack(records))
    return packs


def write_tensorrt(folder: Path) -> Path:
    """Two ranks: request a's forwards on the first, b's on the second; iterations 50 to 53."""
    folder.mkdir()
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": EXPERTS, "num_experts_per_token": TOP_K}))
    for rank, name in enumerate("ab"):
        raw, counts = {}, {}
        cuts = [0, PROMPT[name], *range(PROMPT[name] + 1, TOKENS[name] + 1)]
        for i, (start, end) in enumerate(itertools.pairwise(cuts)):
            for layer in range(1, HIDDEN):
                experts = ROUTES[name][start:end, layer - 1].astype(np.int32)
                raw[f"{50 + i}_{layer}"] = np.ascontiguousarray(experts)
                counts[f"{50 + i}_{layer}"] = np.bincount(experts.ravel(), minlength=EXPERTS)
        save_file(raw, folder / f"rank{rank}_raw.safetensors")
        save_file(counts, folder / f"rank{rank}.safetensors")
    return folder


def policylang_columns() -> dict[str, list[Any]]:
    """Rows in random order, with scores of all experts and logits."""
    rows = []
    for number, name in ((7, "a"), (3, "b")):
        for t in range(TOKENS[name]):
            for layer in range(1, HIDDEN):
                experts = ROUTES[name][t, layer - 1]
                logits = np.linspace(-1, 1, EXPERTS)
                logits[experts] = [4, 3]
                rows.append(
                    {
                        "prompt_id": number,
                        "token_idx": t,
                        "layer_idx": layer,
                        "selected_experts": experts.tolist(),
                        "router_scores": [0.75, 0.25],
                        "router_softmax": (np.exp(logits) / np.exp(logits).sum()).tolist(),
                        "router_logits": logits.tolist(),
                        "token_id": IDS[name][t],
                        "phase": "prefill" if t < PROMPT[name] else "decode",
                        "language_tag": "en",
                        "domain_tag": {"a": "law", "b": "code"}[name],
                        "token_loss": 1.5,
                        "kv_shard_id": 0,
                    }
                )
    order = np.random.default_rng(5).permutation(len(rows))
    return {key: [rows[i][key] for i in order] for key in rows[0]}


def write_policylang(path: Path, **changed: Any) -> Path:
    columns = {**policylang_columns(), **changed}
    pq.write_table(pa.table({key: value for key, value in columns.items() if value is not None}), path)
    return path


def moe_cache_lab_records(name: str = "a") -> list[dict[str, Any]]:
    """A version 1 trace: the prompt layer by layer, then token by token."""
    order = [(t, layer) for layer in range(1, HIDDEN) for t in range(PROMPT[name])]
    order += [(t, layer) for t in range(PROMPT[name], TOKENS[name]) for layer in range(1, HIDDEN)]
    head = {
        "record_type": "metadata",
        "format": "moe-cache-lab.routing-jsonl",
        "format_version": 1,
        "model_id": "lab/tiny",
        "num_experts": EXPERTS,
        "experts_per_token": TOP_K,
    }
    events = [
        {
            "record_type": "routing_selection",
            "phase": "prompt" if t < PROMPT[name] else "generated",
            "token_position": t,
            "layer": layer,
            "selected_experts": ROUTES[name][t, layer - 1].tolist(),
            "selected_probabilities": [0.5, 0.25],
            "token_id": IDS[name][t],
        }
        for t, layer in order
    ]
    return [head, *events]
