"""Routes in the order of the model's layers, without token numbers: recovery of forwards and requests.

An engine that hooks its router writes, for each forward, the tokens of the first MoE layer, then those of the next.
A forward therefore ends where the layer number falls. Such files lack two things:

- Requests. A forward of several tokens counts as a prompt (or a chunk of one), a forward of one token as a new token. A
  request begins with the first prompt chunk after a new token.
- Prompt tokens in the last layer. Engines that need logits for the last token only skip the other tokens there. These
  repeat the experts of the next token that has some, so that the union is as recorded.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.routes import Routes, RouteSequence, check, renormalized


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """The rows of a file, one for each token in each layer, in the order of the file.

    Attributes:
        layer_R: absolute layer.
        weights_RK: weights of the experts, if the file has them.
        decode_R: whether the row is a new token, if the file marks it.
        most_drafts: maximum tokens in a forward of new tokens (above 1: drafts that are verified together).
    """

    layer_R: np.ndarray
    experts_RK: np.ndarray
    weights_RK: np.ndarray | None = None
    decode_R: np.ndarray | None = None
    most_drafts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """The rows of a file by token.

    Attributes:
        layers: absolute layers with experts, ascending.
        experts_TLK, weights_TLK: as in the file.
        forward_T: running number of the forward.
        starts: first token of each request.
        prompt_tokens: number of prompt tokens of each request; if it begins with new tokens 0 where the file marks
            them, else None.
        filled: number of prompt tokens that had no row in the last layer.
    """

    layers: list[int]
    experts_TLK: np.ndarray
    weights_TLK: np.ndarray | None
    forward_T: np.ndarray
    starts: list[int]
    prompt_tokens: list[int | None]
    filled: int

    def routes(self, path: Path, facts: ModelFacts, notes: list[str], *, with_forwards: bool = False) -> Routes:
        """Return the checked routes of the file, each request a sequence.

        Args:
            notes: notes on the file, extended if tokens had no row in the last layer.
            with_forwards: keep the forward that each token ran in.

        Raises:
            UsageError: the number of experts or their bytes are neither in the file nor given.
            MismatchError: the rows are invalid, or the file and the given model differ.
        """
        num_tokens, num_layers, top_k = self.experts_TLK.shape
        num_experts, more = facts.num_experts_or(self.experts_TLK)
        spec = facts.spec_of(path, layers=self.layers, num_experts=num_experts, top_k_L=[top_k] * num_layers)
        notes = [*notes, *more]
        experts_TS, weights_TS = self.experts_TLK.reshape(num_tokens, -1), None
        if self.weights_TLK is not None:
            weights_TS = self.weights_TLK.reshape(num_tokens, -1).astype(np.float16)
        check(path, spec, experts_TS, weights_TS)
        if self.filled:
            notes = [
                *notes,
                f"{self.filled} prompt tokens have no experts in layer {self.layers[-1]} in the file; they repeat "
                f"those of a later one, so that the union of the prompt is as recorded",
            ]
        spans = [slice(a, b) for a, b in pairwise([*self.starts, num_tokens])]
        last_TS = None if weights_TS is None else weights_TS[[span.stop - 1 for span in spans]]
        return Routes(
            spec=renormalized(spec, facts, last_TS),
            task=path.stem,
            sequences=[
                RouteSequence(
                    name=str(i),
                    prompt_tokens=prompt,
                    experts_TS=experts_TS[span].astype(np.uint16),
                    weights_TS=None if weights_TS is None else weights_TS[span],
                    forward_T=self.forward_T[span].astype(np.int32) if with_forwards else None,
                )
                for i, (span, prompt) in enumerate(zip(spans, self.prompt_tokens, strict=True))
            ],
            notes=notes,
        )


def by_token(path: Path, rows: LayerRows) -> TokenRows:
    """Split the rows into forwards, tokens and requests.

    Raises:
        MismatchError: a forward lacks a layer, or its layers have different numbers of tokens.
    """
    layer_R = rows.layer_R
    start_N = np.flatnonzero(np.diff(layer_R, prepend=layer_R[0] - 1))  # runs of one layer
    tokens_N = np.diff(np.append(start_N, len(layer_R)))
    layer_N = layer_R[start_N]
    layers, place_N = np.unique(layer_N, return_inverse=True)
    forward_N = np.cumsum(np.diff(layer_N, prepend=layer_N[0]) < 0)
    num_forwards, num_layers = int(forward_N[-1]) + 1, len(layers)
    tokens_FL = np.zeros((num_forwards, num_layers), np.int64)
    start_FL = np.full((num_forwards, num_layers), -1, np.int64)
    tokens_FL[forward_N, place_N] = tokens_N
    start_FL[forward_N, place_N] = start_N
    tokens_F = tokens_FL[:, 0]
    _check_forwards(path, layers, tokens_FL)
    first_F = np.concatenate([[0], np.cumsum(tokens_F)])
    num_tokens = int(first_F[-1])
    forward_T = np.repeat(np.arange(num_forwards), tokens_F)
    offset_T = np.arange(num_tokens) - first_F[forward_T]
    row_TL = start_FL[forward_T] + offset_T[:, None]
    absent_T = np.zeros(num_tokens, bool)
    if num_layers > 1:
        # The last layer may have rows of the forward's last tokens only.
        short_F = tokens_F - tokens_FL[:, -1]
        absent_T = offset_T < short_F[forward_T]
        row_TL[:, -1] -= short_F[forward_T]
        present = np.flatnonzero(~absent_T)
        if not len(present) or absent_T[-1]:
            raise MismatchError(f"{path} ends before the last layer of its last prompt; the file is cut off")
        following = present[np.searchsorted(present, np.flatnonzero(absent_T))]
        row_TL[absent_T, -1] = row_TL[following, -1]
    weights_TLK = None if rows.weights_RK is None else rows.weights_RK[row_TL]
    if weights_TLK is not None:
        weights_TLK[absent_T, -1] = 0
    decode_F = tokens_F <= rows.most_drafts if rows.decode_R is None else rows.decode_R[start_FL[:, 0]]
    starts, prompts = _requests(decode_F, tokens_F, first_F, marked=rows.decode_R is not None)
    return TokenRows(
        layers=layers.tolist(),
        experts_TLK=rows.experts_RK[row_TL],
        weights_TLK=weights_TLK,
        forward_T=forward_T,
        starts=starts,
        prompt_tokens=prompts,
        filled=int(absent_T.sum()),
    )


def _check_forwards(path: Path, layers: np.ndarray, tokens_FL: np.ndarray) -> None:
    for place in range(len(layers) - 1):
        wrong = np.flatnonzero(tokens_FL[:, place] != tokens_FL[:, 0])
        if len(wrong):
            at = int(wrong[0])
            raise MismatchError(
                f"{path}, forward {at}: layer {layers[place]} has {tokens_FL[at, place]} tokens and layer {layers[0]} "
                f"{tokens_FL[at, 0]}, expected as many; rows are missing"
            )
    if len(layers) == 1:
        return
    if (wrong := np.flatnonzero(tokens_FL[:, -1] > tokens_FL[:, 0])).size or (tokens_FL[:, 0] == 0).any():
        at = int(wrong[0]) if wrong.size else int(np.argmin(tokens_FL[:, 0]))
        raise MismatchError(
            f"{path}, forward {at}: layer {layers[-1]} has {tokens_FL[at, -1]} tokens and layer {layers[0]} "
            f"{tokens_FL[at, 0]}, expected at most as many; if layer {layers[-1]} is a draft head (MTP), name the "
            f"model's layers with --set num_hidden_layers={layers[-1]}"
        )


def _requests(
    decode_F: np.ndarray, tokens_F: np.ndarray, first_F: np.ndarray, *, marked: bool
) -> tuple[list[int], list[int | None]]:
    starts: list[int] = []
    prompts: list[int | None] = []
    for forward, decode in enumerate(decode_F.tolist()):
        if forward == 0 or (not decode and decode_F[forward - 1]):
            starts.append(int(first_F[forward]))
            prompts.append(None if decode and not marked else 0)
        if not decode:
            before = prompts[-1]
            assert before is not None
            prompts[-1] = before + int(tokens_F[forward])
    return starts, prompts
