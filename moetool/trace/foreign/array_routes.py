"""Sequences of routes from arrays [T, L, K] or [B, T, L, K] of expert numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign.array_file import find
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.routes import Routes, RouteSequence, check, renormalized

TOKEN_IDS = "input_ids token_ids tokens ids"
_PRESENT = "attention_mask mask"
_PROMPTS = "prompt_lengths prompt_length prompt_lens prompt_len prompt_tokens num_prompt_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRoutes:
    """Arrays of a file.

    Attributes:
        layers: absolute layers of the second last axis.
        experts_BTLK: experts; -1 marks places that the program left blank.
        weights_BTLK: their weights, if known.
        logits_BTLE: logits of all experts, if known.
        num_experts: number of experts, if the file tells it.
    """

    layers: tuple[int, ...]
    experts_BTLK: np.ndarray
    weights_BTLK: np.ndarray | None = None
    logits_BTLE: np.ndarray | None = None
    num_experts: int | None = None


def batched(path: Path, values: np.ndarray, layers: tuple[int, ...] | None, facts: ModelFacts) -> tuple[Any, Any, Any]:
    """Return values as [B, T, L, X], the absolute layers, and notes.

    An array of three dimensions is [T, L, X], or [L, T, X] if only that fits the given number of layers.

    Raises:
        MismatchError: it has other dimensions, or its layers differ from the given ones.
    """
    if not 2 <= values.ndim <= 4:
        raise MismatchError(f"{path} has an array {list(values.shape)}, expected tokens, layers and experts")
    notes = []
    if values.ndim == 2:
        values = values[:, None]
    if layers is None and values.ndim == 3:
        counts = {facts.known("num_hidden_layers"), facts.spec and facts.spec.num_layers, len(facts.moe_layers or ())}
        if values.shape[0] in counts and values.shape[1] not in counts:
            values = values.transpose(1, 0, 2)
        notes.append(f"the array was read as {values.shape[0]} tokens in {values.shape[1]} layers")
    values = values.reshape(-1, *values.shape[-3:])
    if layers is None:
        told = facts.spec.layer_ids_L if facts.spec else facts.moe_layers
        layers = told if told and len(told) == values.shape[2] else tuple(range(values.shape[2]))
    return values, layers, notes


def routes(path: Path, pack: Mapping[str, Any], arrays: ArrayRoutes, facts: ModelFacts, notes: list[str]) -> Routes:
    """Return each row of the batch as a sequence, without blank tokens and layers.

    Raises:
        MismatchError: a layer is invalid, the arrays beside the routes have another shape, or padding cannot be told.
    """
    experts_BTLK = arrays.experts_BTLK.astype(np.int64)
    batch, length = experts_BTLK.shape[:2]
    used_L = (experts_BTLK != -1).any(axis=(0, 1, 3))
    layers = [layer for layer, used in zip(arrays.layers, used_L, strict=True) if used]
    if facts.spec is not None or facts.moe_layers is not None or facts.first_k_dense is not None:
        asked = facts.layers_of(path, max(arrays.layers) + 1)
        layers = [layer for layer in layers if layer in asked]
    if not layers:
        raise MismatchError(f"{path} has no experts in any layer, expected some: the recorder was off")
    keep_L = np.isin(arrays.layers, layers)
    experts_BTLK = experts_BTLK[:, :, keep_L]
    blank_BT = (experts_BTLK == -1).all(axis=(2, 3))
    ids_BT = None if (name := find(pack, TOKEN_IDS)) is None else _beside(path, name, pack[name], batch, length)
    prompts_B = _prompts(path, pack, batch)
    if (present := find(pack, _PRESENT)) is not None:
        blank_BT = blank_BT | (_beside(path, present, pack[present], batch, length) == 0)
    elif batch > 1 and not blank_BT.any():
        _require_unpadded(path, ids_BT, prompts_B)
        notes = [*notes, f"no attention_mask: all {length:,} tokens of each of {batch:,} sequences count, padding too"]
    begin_B = (~blank_BT).argmax(axis=1)  # of the prompt, after the padding at its left
    if blank_BT.any():
        notes = [*notes, f"{int(blank_BT.sum()):,} tokens without experts (blank or padding) left out"]
    top_k = experts_BTLK.shape[3]
    num_experts = arrays.num_experts
    if num_experts is None:
        num_experts, more = facts.num_experts_or(experts_BTLK)
        notes = [*notes, *more]
    logits = arrays.logits_BTLE
    spec = facts.spec_of(
        path, layers=layers, num_experts=num_experts, top_k_L=[top_k] * len(layers), has_logits=logits is not None
    )
    sequences = []
    for b in range(batch):
        keep_T = ~blank_BT[b]
        if not keep_T.any():
            continue
        rows = int(keep_T.sum())
        experts_TS = experts_BTLK[b, keep_T].reshape(rows, -1)
        parts = [
            None if values is None else values[b][keep_T][:, keep_L].reshape(rows, -1).astype(np.float16)
            for values in (arrays.weights_BTLK, logits)
        ]
        check(path, spec, experts_TS, parts[0], all_layers=True)
        sequences.append(
            RouteSequence(
                name=str(b),
                prompt_tokens=None if prompts_B is None else int(keep_T[begin_B[b] :][: prompts_B[b]].sum()),
                experts_TS=experts_TS.astype(np.uint16),
                weights_TS=parts[0],
                logits_TF=parts[1],
                token_id_T=None if ids_BT is None else ids_BT[b, keep_T].astype(np.int32),
                position_T=(np.flatnonzero(keep_T) - np.argmax(keep_T)).astype(np.int32),
            )
        )
    weights = [one.weights_TS for one in sequences if one.weights_TS is not None]
    return Routes(
        spec=renormalized(spec, facts, np.concatenate(weights) if weights else None),
        task=path.name.partition(".")[0],
        sequences=sequences,
        notes=["the file does not name the model", *notes],
    )


def _require_unpadded(path: Path, ids_BT: np.ndarray | None, prompts_B: list[int] | None) -> None:
    """Raise MismatchError if ids or prompts look padded: a token twice at an end, or prompts of several lengths.

    A single padding token, or padding of sequences without ids, looks like text.
    """
    found = ""
    if ids_BT is not None and ids_BT.shape[1] > 1:
        for verb, at, next_to in (("begins", 0, 1), ("ends", -1, -2)):
            for sequence in np.flatnonzero(ids_BT[:, at] == ids_BT[:, next_to])[:1]:
                found = found or f"sequence {sequence} {verb} with token {ids_BT[sequence, at]} twice"
    if prompts_B is not None and len(set(prompts_B)) > 1:
        found = found or f"the prompts have {min(prompts_B)} to {max(prompts_B)} tokens"
    if found:
        raise MismatchError(
            f"{path} has no attention_mask and {found}: padding cannot be told from text; add the mask, 1 for each "
            "token and 0 for padding"
        )


def _beside(path: Path, name: str, value: Any, batch: int, length: int) -> np.ndarray:
    """Return [B, T] of an entry beside the routes."""
    found = np.asarray(value)
    if found.size != batch * length or found.dtype.kind not in "iub":
        raise MismatchError(
            f"{path} has {name} of {list(found.shape)}, expected a whole number for each of {batch} x {length} tokens"
        )
    beside: np.ndarray = found.reshape(batch, length)
    if beside.dtype.kind != "b" and (beside.min() < -1 or beside.max() >= 2**31):
        raise MismatchError(f"{path} has {name} {beside.min()} to {beside.max()}, expected 0 to 2147483647")
    return beside


def _prompts(path: Path, pack: Mapping[str, Any], batch: int) -> list[int] | None:
    if (name := find(pack, _PROMPTS)) is None:
        return None
    found = np.asarray(pack[name]).reshape(-1)
    if len(found) != batch or found.dtype.kind not in "iu" or found.min() < 0:
        raise MismatchError(
            f"{path} has {name} {str(pack[name])[:40]}, expected a number for each of {batch} sequences"
        )
    return found.tolist()
