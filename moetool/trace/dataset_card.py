"""The dataset card of a trace: README.md in its folder, as the Hugging Face hub reads it."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from moetool.base.types import ModelSpec

CARD = "README.md"

MEANINGS: dict[str, tuple[str, str]] = {
    "request": ("int32", "the request that the token belongs to, a row of requests.parquet"),
    "forward": ("int32", "number of the forward pass; tokens with the same number ran together"),
    "phase": ("uint8", "0 prefill (a token of the prompt), 1 decode (a new token)"),
    "iteration": ("int32", "number of the forward within its request: 0 is the prompt"),
    "position": ("int32", "position in the sequence, from 0"),
    "token_id": ("int32", "token id; -1 where withheld"),
    "experts": ("uint16[{S}]", "the k experts of each MoE layer, layer after layer, as the model's router chose them"),
    "weights": ("float16[{S}]", "their weights in the layer's output"),
    "logits": ("float16[{F}]", "router logits over all experts, before softmax or sigmoid"),
    "hidden": ("float16[{H}]", "hidden state at each router's input"),
    "ahead": ("float16[{R}]", "logits of the next {ahead} layers' routers on the same hidden state"),
    "resident": ("float16[{W}]", "logits of the next layer's router if only resident experts were computed"),
    "scores": ("float16[{F}]", "the router's ranking scores of all experts, correction bias included"),
    "logits32": ("float32[{F}]", "router logits in float32"),
    "norms": ("float16[{S}]", "Euclidean norm of each chosen expert's output, before its weight"),
    "embeddings": ("float16[{D}]", "iterations/*.parquet: mean output of the embedding layer over an iteration"),
    "text": ("string", "vocabulary.parquet: the text of each token id that occurs"),
}
"""Type and meaning of each column; letters in brackets are widths."""


def columns_table(spec: ModelSpec, columns: list[str], ahead: int) -> str:
    """Return the columns of a trace as a Markdown table."""
    widths = {
        "S": sum(spec.top_k_L),
        "F": sum(spec.num_experts_L),
        "H": spec.num_layers * spec.hidden_size,
        "R": spec.num_layers * ahead * spec.num_experts,
        "W": spec.num_layers * spec.num_experts,
        "D": spec.hidden_size,
        "ahead": ahead,
    }
    rows = [
        f"| `{name}` | {kind.format(**widths)} | {meaning.format(**widths)} |"
        for name, (kind, meaning) in MEANINGS.items()
        if name in columns
    ]
    return "\n".join(["| column | type | meaning |", "| --- | --- | --- |", *rows])


def card(spec: ModelSpec, contents: Mapping[str, Any], schema_version: str) -> str:
    """Return the dataset card of a trace.

    Args:
        contents: entries of its manifest: columns, ahead, composition, requests, tokens, provenance.
    """
    offsets = [0, *np.cumsum(spec.top_k_L).tolist()]
    even = len(set(spec.top_k_L)) == 1
    layout = (
        f"Layer i of {spec.num_layers} (absolute layers {span_of(spec.layer_ids_L)}) has the values "
        f"{spec.top_k_L[0]} i to {spec.top_k_L[0]} (i + 1) - 1 of `experts` and `weights`."
        if even
        else f"Layer i has the values offsets[i] to offsets[i + 1] - 1 of `experts`, with the offsets {offsets}."
    )
    model = str(contents["provenance"].get("model", spec.name))
    return f"""---
pretty_name: {json.dumps(f"Expert routing of {model}", ensure_ascii=False)}
tags:
- mixture-of-experts
- routing
- moetool
configs:
- config_name: tokens
  data_files: tokens/*.parquet
  default: true
- config_name: requests
  data_files: requests.parquet
---

# Expert routing of {model}

{contents["tokens"]:,} forwarded tokens of {contents["requests"]:,} requests; {spec.num_layers} MoE layers of \
{span_of(spec.num_experts_L)} experts, top-{span_of(spec.top_k_L)}; router scores by {spec.score_function}. Batches: \
{" ".join(str(value) for value in contents["composition"].values())}. Trace schema {schema_version} of moetool.

`requests.parquet` has a row for each request: dataset, task, prompt_id, prompt_tokens, new_tokens, label, pair and
tokens (rows).
`tokens/*.parquet` has a row for each forwarded token, in the order of the forwards:

{columns_table(spec, list(contents["columns"]), int(contents["ahead"]))}

{layout} An engine samples one token more than it forwards: the last new token of an answer has no row.

Token ids reveal the text: remove them (`--drop-tokens`) before sharing traces of private text.

```python
import moetool
trace = moetool.open_trace("FOLDER")
trace.by_layer("experts")     # [tokens, layers, k]
trace.to_pandas()             # a row for each token, layer and expert
```
"""


def span_of(numbers: tuple[int, ...]) -> str:
    """Return the number that all share, or the least to the greatest."""
    return str(numbers[0]) if len(set(numbers)) == 1 else f"{min(numbers)} to {max(numbers)}"
