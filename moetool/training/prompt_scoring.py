"""Scores of predictions for pending requests: their prompts, workload and new tokens.

Only the prompt of a pending request is known. Predictions for prompt tokens and for new tokens are scored separately,
as the phases `prefill` and `decode`, over all layers.
"""

from dataclasses import dataclass

import numpy as np
import torch

from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.trace.reader import Trace
from moetool.training.predictor import Predictor
from moetool.training.tally import MatchScore, MatchTally


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPrediction:
    """Scores of predictions from prompts alone.

    A workload matrix holds the number of tokens for each expert of each layer.

    Attributes:
        num_requests: pending requests.
        scores: at distance 0: all layers and phases first, then by phase and layer.
        load_error: share of a prompt's workload predicted for wrong experts (0: none, 1: all), mean over requests and
            layers.
        request_load_error: the same for whole requests with a known number of new tokens; None without new tokens.
        busiest: how often the most loaded expert of a layer is predicted, over requests and layers.
    """

    num_requests: int
    prompt_tokens: int
    new_tokens: int
    scores: tuple[MatchScore, ...]
    load_error: float
    request_load_error: float | None
    busiest: float

    def overall(self, phase: str) -> MatchScore | None:
        """Return the score of a phase over all layers."""
        return next((s for s in self.scores if s.phase == phase and s.layer is None), None)

    def deepest(self, phase: str) -> float | None:
        """Return the match in the last quarter of the layers, the hardest from a prompt."""
        match_L = [s.match for s in self.scores if s.phase == phase and s.layer is not None]
        last = match_L[-max(1, len(match_L) // 4) :]
        return sum(last) / len(last) if last else None


def judge(predictor: Predictor, trace: Trace, requests: frozenset[int]) -> PromptPrediction:
    """Predict requests of a trace from their prompts alone, and compare with their routing.

    Raises:
        MismatchError: the trace is damaged, or withholds required token ids.
        MoetoolError: a score is not finite.
    """
    judged = _Judged(predictor)
    held: list[tuple[ForwardInfo, list[GateEvent]]] = []
    for info, events in trace.forwards(sequential=True, requests=requests):
        if held and held[0][0].request_T[0] != info.request_T[0]:
            judged.add(held)
            held = []
        held.append((info, events))
    if held:
        judged.add(held)
    return judged.result()


class _Judged:
    """Sums over scored requests."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.tally = MatchTally(predictor, [0])
        self.tokens = [0, 0]
        self.prompt_errors: list[float] = []
        self.request_errors: list[float] = []
        self.busiest: list[float] = []

    @torch.inference_mode()
    def add(self, forwards: list[tuple[ForwardInfo, list[GateEvent]]]) -> None:
        """Score one request, given all its forwards."""
        phase_T = torch.tensor([phase for info, _ in forwards for phase in info.phase_T])
        ids_T = torch.tensor([token for info, _ in forwards for token in info.token_id_T or ()])
        prompt_T = phase_T == Phase.PREFILL
        if not bool(prompt_T.any()):
            return  # the trace begins within the request
        experts_TLK = torch.cat(
            [torch.tensor([event.experts_TK for event in events]).transpose(0, 1) for _, events in forwards]
        )
        num_layers, num_experts = self.predictor.num_layers, self.predictor.num_experts
        prompt = ids_T[prompt_T].tolist()
        scores_SLE, score_LE = self.predictor.predict_prompt(prompt)
        for phase, predicted_TLE in (
            (Phase.PREFILL, scores_SLE),
            (Phase.DECODE, score_LE.expand(len(ids_T) - len(prompt), -1, -1)),
        ):
            of_T = phase_T == phase
            self.tokens[phase] += int(of_T.sum())
            for layer in range(num_layers if bool(of_T.any()) else 0):
                self.tally.count(0, layer, predicted_TLE[:, layer], experts_TLK[of_T, layer], phase_T[of_T])
        cell_TLK = experts_TLK + num_experts * torch.arange(num_layers)[:, None]

        def load_LE(of_T: torch.Tensor) -> np.ndarray:
            counts = torch.bincount(cell_TLK[of_T].flatten(), minlength=num_layers * num_experts)
            return counts.view(num_layers, num_experts).numpy().astype(np.float64)

        predicted_LE, true_LE = self.predictor.workload(prompt), load_LE(prompt_T)
        self.prompt_errors.append(_misplaced(predicted_LE, true_LE))
        busiest_L = true_LE[np.arange(num_layers), predicted_LE.argmax(axis=1)]
        self.busiest.append(float((busiest_L == true_LE.max(axis=1)).mean()))
        if more := len(ids_T) - len(prompt):
            whole_LE = load_LE(torch.ones_like(prompt_T))
            self.request_errors.append(_misplaced(self.predictor.workload(prompt, more), whole_LE))

    def result(self) -> PromptPrediction:
        return PromptPrediction(
            num_requests=len(self.prompt_errors),
            prompt_tokens=self.tokens[Phase.PREFILL],
            new_tokens=self.tokens[Phase.DECODE],
            scores=self.tally.scores(),
            load_error=float(np.mean(self.prompt_errors)) if self.prompt_errors else 0.0,
            request_load_error=float(np.mean(self.request_errors)) if self.request_errors else None,
            busiest=float(np.mean(self.busiest)) if self.busiest else 0.0,
        )


def _misplaced(predicted_LE: np.ndarray, true_LE: np.ndarray) -> float:
    """Return half the L1 distance of two workloads of equal size, relative to the size, mean over layers."""
    return float((np.abs(predicted_LE - true_LE).sum(axis=1) / (2 * true_LE.sum(axis=1))).mean())
