"""Evaluation: the measures, and the requests that they are taken on."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moetool.base import durable
from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.prediction.unseen_requests import held_out
from moetool.trace.merge import merge
from moetool.trace.reader import Trace
from moetool.trace.same_prompts import digest_of_tokens, prompt_digests
from moetool.trace.writer import TraceWriter
from moetool.training.evaluate import evaluate
from moetool.training.fit_options import FitOptions
from moetool.training.predictor import Predictor, load_predictor
from moetool.training.tally import MatchTally
from moetool.training.tokens import Tokens, stream
from moetool.training.training import split_requests, train
from tests.profiles import compute, line, make_profile
from tests.refusals import refused
from tests.synthetic_routes import make_rows, make_spec, write_trace


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


def _repeating(path: Path, trace: Path, requests: Sequence[int], *, name: str = "", tokens: bool = True) -> Path:
    """Some requests of a trace under other names, and perhaps without their tokens."""
    source = Trace(trace)
    with durable.staged_directory(path) as staged:
        writer = TraceWriter(staged, source.spec, ["topk"])
        for number, rows in enumerate(r for r in source.whole_requests(["weights"]) if r.request_T[0] in requests):
            told = {"dataset": f"renamed{name}", "task": "t", "prompt_id": f"x{number}", "new_tokens": 8}
            writer.add_request(number, **told, prompt_tokens=12)
            ids_T = rows.token_id_T if tokens else np.full(len(rows), -1, np.int32)
            swapped_TS = rows.experts_TS.reshape(len(rows), -1, 2)[:, :, ::-1].reshape(len(rows), -1)
            request_T, forward_T = np.full(len(rows), number, np.int32), rows.iteration_T + 9 * number
            more = {"request_T": request_T, "forward_T": forward_T.astype(np.int32), "token_id_T": ids_T}
            writer.append(replace(rows, experts_TS=swapped_TS, **more))
        writer.finish(composition={"kind": "sequential"}, provenance={})
    return path


@pytest.mark.parametrize("tokens", [True, False])
def test_another_trace_is_scored_except_seen_prompts(tmp_path: Path, tokens: bool) -> None:
    """Seen are those of the same content, whatever they are called; tokens withheld, those of the same experts."""
    trace = write_trace(tmp_path / "trace")
    card = train("popularity", trace, tmp_path / "popularity")
    unseen = write_trace(tmp_path / "unseen", seed=1)  # the same names
    (evaluation,) = evaluate([tmp_path / "popularity"], unseen)  # affinity cannot be had from its buffers
    assert (evaluation.requests, evaluation.num_requests, evaluation.num_skipped) == ("all", 20, 0)
    again = _repeating(tmp_path / "again", trace, range(20), tokens=tokens)
    assert held_out(card, Trace(again)) == frozenset(card["requests"]["test"])
    (evaluation,) = evaluate([tmp_path / "popularity"], again)
    assert (evaluation.requests, evaluation.num_requests, evaluation.num_skipped) == ("all", 3, 17)
    named = {**card, "seen_prompts": ["renamed/x0", "synthetic/1"]}  # as a card of before
    assert held_out(named, Trace(again)) == frozenset(range(1, 20))


def test_prompts_are_matched_without_their_answers(tmp_path: Path) -> None:
    spec = make_spec()
    rows = make_rows(spec, 5, 3, request=0, first_forward=0, rng=np.random.default_rng(0))
    late = rows.select(slice(5, None))  # no row of its prompt
    other = replace(rows, token_id_T=np.where(rows.iteration_T > 0, 7, rows.token_id_T).astype(np.int32))
    with durable.staged_directory(tmp_path / "trace") as staged:
        writer = TraceWriter(staged, spec, ["topk"])
        for number, part in enumerate((rows, other, late, rows.select(slice(0, 4)))):
            writer.add_request(number, dataset="d", task="t", prompt_id=str(number), prompt_tokens=5, new_tokens=3)
            placed = replace(
                part, request_T=np.full(len(part), number, np.int32), forward_T=part.forward_T + 10 * number
            )
            writer.append(placed)
        writer.finish(composition={"kind": "sequential"}, provenance={})
    known = prompt_digests(Trace(tmp_path / "trace"))
    assert known[0] == known[1] and digest_of_tokens(rows.token_id_T[:5].tolist()) in known[0]
    assert len(known[0]) == 2 and not known[0] & (known[2] | known[3]) and not known[2] & known[3]
    assert prompt_digests(Trace(tmp_path / "trace"), [3]) == {3: known[3]}


def test_a_trace_of_seen_prompts_only_is_refused(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    train("popularity", trace, tmp_path / "popularity")
    seen = load_predictor(tmp_path / "popularity").card["requests"]["train"][0]
    again = _repeating(tmp_path / "again", trace, [seen])
    with refused(UsageError, "trained", "prompt", "1"):
        evaluate([tmp_path / "popularity"], again)


def test_all_predictors_are_scored_on_requests_unseen_by_all(tmp_path: Path) -> None:
    """Of other splits, of another trace, and of a request that repeats a prompt in its own trace."""
    trace = write_trace(tmp_path / "trace")
    tests = []
    for name, seed in (("popularity", 0), ("affinity", 1), ("activation_matrix", 0)):
        tests.append(
            set(train(name, trace, tmp_path / name, seed=seed, fit=FitOptions(held_out=0.3))["requests"]["test"])
        )
    common = tests[0] & tests[1]
    assert common and common < tests[0] == tests[2]
    rows = evaluate([tmp_path / name for name in ("popularity", "affinity", "activation_matrix")], trace)
    scope = {(row.requests, row.num_requests, row.num_skipped, row.num_tokens) for row in rows}
    assert scope == {("test", len(common), 20 - len(common), 20 * len(common))} and len(rows) == 5
    alone = {name: evaluate([tmp_path / name], trace)[0] for name in ("popularity", "affinity")}
    assert alone["affinity"].num_requests == len(tests[1])
    train("popularity", write_trace(tmp_path / "elsewhere", seed=5), tmp_path / "else")
    rows = evaluate([tmp_path / "else", tmp_path / "popularity"], trace)
    assert {row.num_requests for row in rows} == {len(tests[0])}
    other = next(s for s in range(99) if not tests[0] & set(split_requests(Trace(trace), s, 0.05).test))
    train("affinity", trace, tmp_path / "few", seed=other, fit=FitOptions(held_out=0.05))
    with refused(UsageError, 20, "affinity 1"):
        evaluate([tmp_path / "popularity", tmp_path / "few"], trace)
    twice = _repeating(tmp_path / "a", trace, range(20))
    doubled, _ = merge([Trace(twice), Trace(_repeating(tmp_path / "b", trace, range(5), name="2"))], tmp_path / "twice")
    card = train("popularity", doubled.path, tmp_path / "twins")
    unseen = held_out(card, doubled)
    twins = {r: r - 20 if r >= 20 else r + 20 for r in (*range(5), *range(20, 25))}
    assert unseen == {r for r in card["requests"]["test"] if r not in twins or twins[r] in card["requests"]["test"]}


def test_another_models_trace_is_refused(tmp_path: Path) -> None:
    train("popularity", write_trace(tmp_path / "trace"), tmp_path / "popularity")
    other = write_trace(tmp_path / "other", make_spec(revision="b" * 64))
    with refused(MismatchError, "synthetic"):
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
        tally = MatchTally(_Oracle(routes_TLK, wrong), [1])
        tally.add(Tokens(experts_TPK=routes_TLK, phase_T=torch.ones(5)))
        (score,) = [s for s in tally.scores() if s.phase == "all" and s.layer is None]
        assert (score.match, score.exact, score.at_least_one) == expected


def test_recall_calibration_and_distance_agree_with_plain_loops(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    card = train("affinity", trace, tmp_path / "affinity")
    (evaluation, *_) = evaluate([tmp_path / "affinity"], trace)
    assert sorted(evaluation.overall()) == [1, 2, 3]
    predictor, source = load_predictor(tmp_path / "affinity"), Trace(trace)
    for distance, score in evaluation.overall().items():
        found: dict[int, list[float]] = {3: [], 4: []}
        bins: dict[int, list[tuple[float, bool]]] = {}
        for tokens in stream(source, {"experts"}, card["requests"]["test"]):
            for layer in range(distance, 4):
                scores_TE = predictor.layer_scores(tokens.before(layer - distance + 1), layer)
                for row_E, true_K in zip(scores_TE, tokens.experts_TPK[:, layer].tolist(), strict=True):
                    for m, shares in found.items():
                        shares.append(len(set(row_E.topk(m).indices.tolist()) & set(true_K)) / 2)
                    for expert, value in enumerate((2 * row_E / row_E.sum()).tolist()):
                        chance = min(value, 1.0)
                        bins.setdefault(min(int(chance * 10), 9), []).append((chance, expert in true_K))
        assert score.recall == pytest.approx([np.mean(found[3]), np.mean(found[4])])
        count = sum(map(len, bins.values()))
        error = sum(abs(sum(p for p, _ in b) - sum(t for _, t in b)) for b in bins.values()) / count
        assert score.calibration_error == pytest.approx(error, abs=1e-3)
        assert score.predictions == (4 - distance) * evaluation.num_tokens


def test_predictors_with_memory_are_scored_in_replay(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    card = train("activation_matrix", trace, tmp_path / "matrix")
    evaluation, *_ = evaluate([tmp_path / "matrix"], trace)
    predictor = load_predictor(tmp_path / "matrix")
    right = [0, 0]
    for _, events in Trace(trace).forwards(sequential=True, requests=frozenset(card["requests"]["test"])):
        for event in events[:-1]:
            predictor.observe(event)
            coming = events[event.layer + 1]
            for row_E, true_K in zip(predictor.scores(coming.layer), coming.experts_TK, strict=True):
                right[0] += len(set(torch.from_numpy(row_E).topk(2).indices.tolist()) & set(true_K))
                right[1] += 2
    assert evaluation.overall()[1].match == pytest.approx(right[0] / right[1])


def test_an_unseen_task_is_scored_too(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    train("affinity", trace, tmp_path / "affinity")
    other = write_trace(tmp_path / "other", seed=1, first_prompt=100)
    rows = evaluate([tmp_path / "affinity"], trace, other)
    assert [(row.predictor, row.unseen_task) for row in rows] == [
        *(("affinity", False), ("popularity", False)),
        *(("affinity", True), ("popularity", True)),
    ]
    assert rows[2].scores == evaluate([tmp_path / "affinity"], other)[0].scores
    assert (rows[0].training_tokens, rows[1].training_tokens) == (14 * 20, None)
    with refused(UsageError, "affinity"):
        evaluate([tmp_path / "affinity"], trace, trace)


def test_a_trace_that_was_split_in_time_is_scored_on_its_end(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", num_requests=1, prompt_tokens=10, new_tokens=30)
    card = train("affinity", trace, tmp_path / "affinity")
    rows = evaluate([tmp_path / "affinity"], trace)
    assert [(r.predictor, r.baseline) for r in rows] == [("affinity", None), ("popularity", "the same tokens")]
    assert [(r.requests, r.num_requests, r.num_tokens, r.prompt_prediction) for r in rows] == [("end", 1, 6, None)] * 2
    predictor = load_predictor(tmp_path / "affinity")
    (tokens,) = stream(Trace(trace), {"experts"}, [0])
    right = [
        len(set(best_K) & set(tokens.experts_TPK[token, layer].tolist()))
        for token in range(34, 40)
        for layer in (1, 2, 3)
        if (best_K := predictor.layer_scores(tokens.before(layer).take([token]), layer)[0].topk(2).indices.tolist())
    ]
    assert rows[0].overall()[1].match == pytest.approx(np.mean(right) / 2)
    with refused(UsageError, "trained", "tokens", "request"):
        held_out(card, Trace(trace))
    again = _repeating(tmp_path / "again", trace, [0])
    with refused(UsageError, "trained", "prompt", "1"):
        evaluate([tmp_path / "affinity"], again)


def test_earlier_tokens_of_a_split_request_are_observed(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", num_requests=1, prompt_tokens=10, new_tokens=30)
    train("activation_matrix", trace, tmp_path / "matrix")
    evaluation, *_ = evaluate([tmp_path / "matrix"], trace)
    predictor = load_predictor(tmp_path / "matrix")
    right, seen = [], 0
    for info, events in Trace(trace).forwards(sequential=True):
        for event in events:
            predictor.observe(event)
            if seen >= 34 and event.layer < 3:
                best_K = torch.from_numpy(predictor.scores(event.layer + 1))[0].topk(2).indices.tolist()
                right.append(len(set(best_K) & set(events[event.layer + 1].experts_TK[0])))
        seen += len(info.request_T)
    assert len(right) == 18
    assert evaluation.overall()[1].match == pytest.approx(np.mean(right) / 2)


def test_times_are_shares_of_the_profiles_step(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    card = train("affinity", trace, tmp_path / "affinity")
    spec = Trace(trace).spec
    profile = make_profile(spec, compute(attention=line(1000)), num_hidden_layers=5)
    (row, counted) = evaluate([tmp_path / "affinity"], trace, profile=profile)
    assert row.decode_step_ms == pytest.approx(1e-6 * (5 * 1000 * 20 + 4 * 2 * 3))  # a context of 20, 3 ns an expert
    assert (row.training_share, row.training_s) == (14 / 20, card["seconds"])
    assert (counted.epochs, counted.training_share, counted.training_s) == (None, None, None)
    assert row.prompt_tokens == 12 and row.prompt_ms > 0
    other = make_profile(make_spec(num_experts=16))
    with refused(MismatchError, "profile", "model"):
        evaluate([tmp_path / "affinity"], trace, profile=other)


def test_prompt_predictions_agree_with_plain_loops(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    card = train("popularity", trace, tmp_path / "popularity")
    (row, _) = evaluate([tmp_path / "popularity"], trace)
    told = row.prompt_prediction
    assert told is not None
    assert (told.num_requests, told.prompt_tokens, told.new_tokens) == (3, 3 * 12, 3 * 8)
    share_LE = load_predictor(tmp_path / "popularity").get_buffer("popularity_LE").double().numpy()
    right: dict[int, list[int]] = {0: [], 1: []}
    errors, whole, busiest = [], [], []
    for request in card["requests"]["test"]:
        (tokens,) = stream(Trace(trace), {"experts"}, [request])
        assert tokens.phase_T is not None
        for layer in range(4):
            best = set(np.argsort(-share_LE[layer], kind="stable")[:2].tolist())
            counts = np.zeros((2, 8))
            for phase, used in zip(tokens.phase_T.tolist(), tokens.experts_TPK[:, layer].tolist(), strict=True):
                right[phase].append(len(best & set(used)))
                counts[phase, used] += 1
            errors.append(np.abs(counts[0] - 24 * share_LE[layer]).sum() / 48)
            whole.append(np.abs(counts.sum(axis=0) - 40 * share_LE[layer]).sum() / 80)
            busiest.append(counts[0, share_LE[layer].argmax()] == counts[0].max())
    for phase, name in enumerate(("prefill", "decode")):
        score = told.overall(name)
        assert score is not None and score.distance == 0
        assert score.match == pytest.approx(np.mean(right[phase]) / 2)
        last = [s.match for s in told.scores if s.phase == name and s.layer == 3]
        assert [told.deepest(name)] == last
    assert told.load_error == pytest.approx(np.mean(errors), abs=1e-6)
    assert told.request_load_error == pytest.approx(np.mean(whole), abs=1e-6)
    assert told.busiest == pytest.approx(np.mean(busiest))


def test_scores_that_are_not_finite_are_refused() -> None:
    tally = MatchTally(_Oracle(torch.zeros(1, 4, 2, dtype=torch.int64), 0), [1])
    with refused(MoetoolError, "layer 1"):
        tally.count(1, 1, torch.full((1, 8), float("nan")), torch.tensor([[0, 1]]), torch.ones(1))
