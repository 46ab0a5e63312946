"""What evaluation counts, and on which requests."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moetool.errors import MismatchError, UsageError
from moetool.evaluation import Tally, evaluate, held_out
from moetool.predictor import Predictor, load_predictor
from moetool.tokens import Tokens
from moetool.trace import Trace
from moetool.training import train
from tests.synthetic_routes import make_spec, write_trace


def _expected(trace: Trace, predictor: Predictor, requests: list[int], phase: int) -> tuple[int, float, float, float]:
    """The measures by plain loops over tokens, layers and experts."""
    matches = []
    for batch in trace.batches():
        for request, of_phase, row in zip(batch.request_T, batch.phase_T, batch.experts_TS, strict=True):
            if request not in requests or of_phase != phase:
                continue
            routes_1LK = torch.from_numpy(row.astype(np.int64).reshape(1, predictor.num_layers, predictor.top_k))
            for layer in range(1, predictor.num_layers):
                predicted = (
                    predictor.layer_scores(Tokens(experts_TPK=routes_1LK[:, :layer]), layer)[0]
                    .topk(predictor.top_k)
                    .indices
                )
                matches.append(len(set(predicted.tolist()) & set(routes_1LK[0, layer].tolist())))
    right, k = np.array(matches), predictor.top_k
    return len(right), right.mean() / k, (right == k).mean(), (right > 0).mean()


@pytest.mark.parametrize(("phase", "number"), [("prefill", 0), ("decode", 1)])
def test_measures_agree_with_plain_loops(tmp_path: Path, phase: str, number: int) -> None:
    trace = write_trace(tmp_path / "trace")
    card = train("affinity", trace, tmp_path / "affinity")
    (evaluation, _) = evaluate([tmp_path / "affinity"], trace)
    (score,) = [s for s in evaluation.scores if s.phase == phase and s.layer is None and s.distance == 1]
    expected = _expected(Trace(trace), load_predictor(tmp_path / "affinity"), card["requests"]["test"], number)
    assert (score.predictions, score.match, score.exact, score.at_least_one) == pytest.approx(expected)


def test_layers_and_phases_add_up(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    card = train("affinity", trace, tmp_path / "affinity")
    evaluation, _ = evaluate([tmp_path / "affinity"], trace)
    assert evaluation.requests == "test"
    assert evaluation.num_requests == len(card["requests"]["test"])
    assert evaluation.num_tokens == 20 * len(card["requests"]["test"])
    assert evaluation.size_bytes == 3 * 8 * 8 * 4
    assert evaluation.expert_bytes_share == evaluation.size_bytes / (4 * 8 * 1024)
    assert evaluation.step_ms > 0
    scores = [score for score in evaluation.scores if score.distance == 1]
    overall = {score.phase: score for score in scores if score.layer is None}
    assert overall["all"].predictions == overall["prefill"].predictions + overall["decode"].predictions
    for phase, total in overall.items():
        layers = [score for score in scores if score.phase == phase and score.layer is not None]
        assert [score.layer for score in layers] == [1, 2, 3]
        assert total.match == pytest.approx(np.mean([score.match for score in layers]))
    assert json.loads(json.dumps(evaluation.to_json()))["scores"][0]["phase"] == "all"


def test_baselines_are_counted_on_the_same_requests(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    for name in ("popularity", "affinity"):
        train(name, trace, tmp_path / name)
    train("affinity", trace, tmp_path / "other_split", seed=1)
    alone = evaluate([tmp_path / "affinity"], trace)
    assert [(e.predictor, e.baseline) for e in alone] == [
        ("affinity", None),
        ("popularity", "the same 14 training requests"),
    ]
    both = evaluate([tmp_path / "affinity", tmp_path / "popularity"], trace)
    assert [(e.predictor, e.baseline) for e in both] == [("affinity", None), ("popularity", None)]
    assert both[1].scores == alone[1].scores
    splits = evaluate([tmp_path / "affinity", tmp_path / "other_split"], trace)
    assert [e.predictor for e in splits] == ["affinity", "popularity", "affinity", "popularity"]


def test_another_trace_counts_in_whole_but_for_seen_prompts(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    card = train("popularity", trace, tmp_path / "popularity")
    unseen = write_trace(tmp_path / "unseen", seed=1, first_prompt=100)
    (evaluation,) = evaluate([tmp_path / "popularity"], unseen)  # affinity cannot be had from its buffers
    assert (evaluation.requests, evaluation.num_requests, evaluation.num_skipped) == ("all", 20, 0)
    again = write_trace(tmp_path / "again", seed=2)
    requests, which, skipped = held_out(card, Trace(again))
    assert (requests, which, skipped) == (frozenset(card["requests"]["test"]), "all", 20 - 3)


def test_a_trace_of_seen_prompts_only_is_refused(tmp_path: Path) -> None:
    train("popularity", write_trace(tmp_path / "trace"), tmp_path / "popularity")
    seen = load_predictor(tmp_path / "popularity").card["requests"]["train"][0]
    again = write_trace(tmp_path / "again", num_requests=1, first_prompt=seen)
    with pytest.raises(UsageError, match="trained on all 1 prompts"):
        evaluate([tmp_path / "popularity"], again)


def test_another_models_trace_is_refused(tmp_path: Path) -> None:
    train("popularity", write_trace(tmp_path / "trace"), tmp_path / "popularity")
    other = write_trace(tmp_path / "other", make_spec(revision="b" * 64))
    with pytest.raises(MismatchError, match="was made for synthetic"):
        evaluate([tmp_path / "popularity"], other)


class _Oracle(Predictor):
    """Knows one routing by heart, but takes the first `wrong` experts of each token for the unlikeliest."""

    def __init__(self, routes_TLK: Tensor, wrong: int) -> None:
        super().__init__(make_spec(), None)
        self.routes_TLK, self.wrong = routes_TLK, wrong

    def count(self, tokens: Tokens) -> None: ...

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        true_TK = self.routes_TLK[:, layer]
        value_TK = torch.ones(true_TK.shape)
        value_TK[:, : self.wrong] = -1
        return torch.zeros(len(tokens), self.num_experts).scatter_(1, true_TK, value_TK)


def test_a_perfect_predictor_scores_one() -> None:
    routes_TLK = torch.tensor([[[6, 7]] * 4] * 5)
    for wrong, expected in ((0, (1, 1, 1)), (1, (0.5, 0, 1)), (2, (0, 0, 0))):
        tally = Tally(_Oracle(routes_TLK, wrong), [1])
        tally.add(Tokens(experts_TPK=routes_TLK, phase_T=torch.ones(5)))
        (score,) = [s for s in tally.scores() if s.phase == "all" and s.layer is None]
        assert (score.match, score.exact, score.at_least_one) == expected
