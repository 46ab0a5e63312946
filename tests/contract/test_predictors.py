"""The contract of every predictor in predictors/."""

import dataclasses
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.base import durable, plugins
from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.trace.events import to_events
from moetool.trace.reader import Trace
from moetool.trace.rows import COLUMNS, KEEP, TokenBatch
from moetool.trace.writer import TraceWriter
from moetool.training import fitting
from moetool.training.evaluate import evaluate
from moetool.training.fit_options import FitOptions
from moetool.training.predictor import WEIGHTS, Predictor, build, load_predictor, save
from moetool.training.tokens import Tokens, from_rows
from moetool.training.training import train
from tests.refusals import refused
from tests.synthetic_routes import AHEAD, make_embedding, make_rows, make_spec, write_trace

ALL = plugins.names("predictor")
NAMES = [name for name in ALL if plugins.load("predictor", name).Predictor.made_of == "trace"]
CLASSES = {name: plugins.load("predictor", name).Predictor for name in NAMES}
LEARNED = [name for name in NAMES if plugins.load("predictor", name).Predictor.learned]
SHAPES = [(2, 2, 1), (3, 5, 5), (4, 8, 2), (5, 130, 6)]

every = pytest.mark.parametrize("name", NAMES)
learned = pytest.mark.parametrize("name", LEARNED)


def _tokens(spec: ModelSpec, num_tokens: int = 16, seed: int = 0) -> Tokens:
    """Whole tokens with every field: a prompt of all but the last three, then new ones."""
    rng = np.random.default_rng(seed)
    rows = make_rows(spec, num_tokens - 3, 3, request=0, first_forward=0, rng=rng)
    embedding_TD = np.repeat(
        rng.normal(size=(4, spec.hidden_size)).astype(np.float32), (num_tokens - 3, 1, 1, 1), axis=0
    )
    return from_rows(spec, rows, embedding_TD)


def _forwards(spec: ModelSpec, num_requests: int = 2, seed: int = 0) -> list[tuple[ForwardInfo, list[GateEvent]]]:
    """Requests one after the other, as `observe` gets them."""
    rng = np.random.default_rng(seed)
    made = []
    for request in range(num_requests):
        rows = make_rows(spec, 4, 3, request=request, first_forward=0, rng=rng)
        for iteration in range(4):
            part = rows.select(rows.iteration_T == iteration)
            embedding_TD = np.repeat(rng.normal(size=(1, spec.hidden_size)).astype(np.float32), len(part), axis=0)
            made.append(to_events(spec, part, len(made), embedding_TD=embedding_TD))
    return made


def _counted(name: str, spec: ModelSpec) -> Predictor:
    torch.manual_seed(0)
    predictor = build(name, spec).eval().requires_grad_(False)
    predictor.count(_tokens(spec))
    return predictor


def _saved(name: str, spec: ModelSpec, folder: Path) -> Predictor:
    """A counted predictor, and its folder, as if it had been made from a trace that is gone."""
    predictor = _counted(name, spec)
    folder.mkdir()
    facts = {
        "trace": {"sha256": "0" * 64, "requests": 3, "tokens": 48},
        "requests": {"train": [0], "validation": [1], "test": [2]},
        "seen_prompts": ["gone/0", "gone/1"],
        "tokens": {"train": 16, "validation": 16},
        "fit": {},
        "seconds": 1.0,
    }
    save(predictor, folder, facts)
    return predictor


def _answers(predictor: Predictor, forwards: list[tuple[ForwardInfo, list[GateEvent]]]) -> list[np.ndarray]:
    """Everything that a predictor says while it watches, at every distance."""
    reach, last = predictor.reach(AHEAD), predictor.num_layers - 1
    said = []
    for _, events in forwards:
        for event in events:
            predictor.observe(event)
            said += [predictor.scores(layer) for layer in range(event.layer + 1, min(event.layer + reach, last) + 1)]
    return said


@pytest.mark.parametrize("name", ALL)
def test_module_exports_options_and_predictor(name: str) -> None:
    module = plugins.load("predictor", name)
    assert issubclass(module.Predictor, Predictor)
    assert module.Options.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(module.Options))
    assert module.Options() == module.Options()  # every option has a default
    assert module.__doc__ and "Source:" in module.__doc__


@every
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_finite_and_have_the_shape_of_the_experts(name: str, shape: tuple[int, int, int]) -> None:
    spec = make_spec(*shape)
    predictor = _counted(name, spec)
    forwards = _forwards(spec)
    for scores_TE in _answers(predictor, forwards):
        assert scores_TE.shape in ((4, spec.num_experts), (1, spec.num_experts))
        assert scores_TE.dtype == np.float32
        assert np.isfinite(scores_TE).all()
        chance_TE = predictor.probabilities(torch.from_numpy(scores_TE))
        assert chance_TE.min() >= 0 and chance_TE.max() <= 1


@every
def test_the_same_tokens_give_the_same_scores(name: str) -> None:
    spec = make_spec()
    first, again = (_answers(_counted(name, spec), _forwards(spec)) for _ in range(2))
    assert all(map(np.array_equal, first, again))


@every
def test_a_prediction_sees_no_other_token(name: str) -> None:
    spec = make_spec()
    predictor, tokens = _counted(name, spec), _tokens(spec)
    if predictor.remembers:
        pytest.skip("it is meant to see the earlier tokens of its request")
    for layer in range(1, 4):
        scores_TE = predictor.layer_scores(tokens.before(layer), layer)
        for token in range(4):
            alone_1E = predictor.layer_scores(tokens.take(slice(token, token + 1)).before(layer), layer)
            torch.testing.assert_close(alone_1E[0], scores_TE[token], rtol=1e-4, atol=1e-5)


@every
def test_another_request_in_the_batch_changes_nothing(name: str) -> None:
    spec = make_spec()
    rng = np.random.default_rng(4)
    rows = [make_rows(spec, 1, 5, request=r, first_forward=0, rng=rng) for r in range(2)]
    embedding_2D = rng.normal(size=(2, spec.hidden_size)).astype(np.float32)
    together, alone = [], []
    for token in range(6):
        pair = [batch.select(slice(token, token + 1)) for batch in rows]
        together.append(to_events(spec, TokenBatch.concatenate(pair), token, embedding_TD=embedding_2D))
        alone.append(to_events(spec, pair[1], token, embedding_TD=embedding_2D[1:]))
    for both, one in zip(_answers(_counted(name, spec), together), _answers(_counted(name, spec), alone), strict=True):
        np.testing.assert_allclose(both[1], one[0], rtol=1e-4, atol=1e-5)


@every
def test_predictions_never_see_the_future(name: str) -> None:
    """Up to the layer where two runs part, whatever comes later, everything that was said is the same."""
    spec = make_spec()
    first, other = _forwards(spec), _forwards(spec, seed=1)
    for forward, layer in ((0, 2), (2, 1), (5, 3)):
        info, events = first[forward]
        mixed = [*events[:layer], *(replace(event, forward=info) for event in other[forward][1][layer:])]
        before = [*first[:forward], (info, events[:layer])]
        expected = _answers(_counted(name, spec), before)
        changed = _answers(_counted(name, spec), [*first[:forward], (info, mixed), *other[forward + 1 :]])
        assert expected
        assert all(map(np.array_equal, expected, changed))


@every
def test_scores_follow_what_was_observed(name: str) -> None:
    spec = make_spec()
    predictor = _counted(name, spec)
    if predictor.remembers:
        pytest.skip("it has no scores of tokens alone")
    reach = predictor.reach(AHEAD)
    tokens = _tokens(spec, 6)
    rows = make_rows(spec, 3, 3, request=0, first_forward=0, rng=np.random.default_rng(0))
    assert tokens.embedding_TD is not None
    for forward, part in enumerate((slice(0, 5), slice(5, 6))):  # a prompt, then a decode step
        embedding_TD = tokens.embedding_TD[part].numpy()
        for event in to_events(spec, rows.select(part), forward, embedding_TD=embedding_TD)[1]:
            predictor.observe(event)
            for coming in range(1, min(event.layer + reach + 1, 4)):  # those ahead, and those that are past by now
                known = tokens.take(part).before(min(coming, event.layer + 1))
                np.testing.assert_array_equal(predictor.scores(coming), predictor.layer_scores(known, coming))


@every
def test_unequal_layers_are_refused(name: str) -> None:
    spec = dataclasses.replace(make_spec(num_layers=3), num_experts_L=(8, 8, 16))
    with refused(UsageError, "2 of 8, 2 of 16"):
        build(name, spec)


@every
def test_trained_saved_and_loaded(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Deterministic under a seed, silent, bit-identical after loading, and leaving the caller's randomness alone."""
    trace = write_trace(tmp_path / "trace", keep=KEEP)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    cards = [
        train(name, trace, tmp_path / out, seed=seed, fit=FitOptions(max_epochs=1))
        for out, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert torch.equal(torch.rand(3), expected)
    assert capfd.readouterr() == ("", "")
    assert cards[0]["weights"] == cards[1]["weights"]
    if cards[0]["weights"]["bytes"] > 100:  # it has any
        assert cards[0]["weights"] != cards[2]["weights"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "c", "trace"]
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    log = ["hparams.yaml", "metrics.csv"] if name in LEARNED else []
    assert files == ["README.md", "card.json", *log, "predictor.safetensors"]

    first, second = load_predictor(tmp_path / "a"), load_predictor(tmp_path / "b")
    assert (first.name, first.spec) == (name, Trace(trace).spec)
    assert not first.training
    forwards = _forwards(first.spec, seed=3)
    assert all(map(np.array_equal, _answers(first, forwards), _answers(second, forwards)))
    (own, *_) = evaluate([tmp_path / "a"], trace)
    assert (own.predictor, own.epochs) == (name, 1 if name in LEARNED else None)
    assert (own.prompt_prediction is not None) == CLASSES[name].predicts_prompts


@every
def test_what_was_saved_is_loaded_to_the_bit(name: str, tmp_path: Path) -> None:
    spec = make_spec()
    predictor = _saved(name, spec, tmp_path / "out")
    loaded = load_predictor(tmp_path / "out")
    assert all(map(np.array_equal, _answers(predictor, _forwards(spec)), _answers(loaded, _forwards(spec))))
    (tmp_path / "again").mkdir()
    save(loaded, tmp_path / "again", loaded.card)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()


@every
def test_numbers_that_are_not_finite_are_refused(name: str, tmp_path: Path) -> None:
    spec = make_spec()
    predictor = _saved(name, spec, tmp_path / "out")
    columns = sorted(predictor.needs - {"experts", "token_id"})
    if not columns:
        pytest.skip("it looks at no numbers")
    for column in columns:
        trace = _write_damaged(tmp_path / column, spec, column)
        for work in (lambda: train(name, trace, tmp_path / "new"), lambda: evaluate([tmp_path / "out"], trace)):  # noqa: B023
            with pytest.raises(MismatchError, match=f"the column {column} (holds|that)"):
                work()
    assert not (tmp_path / "new").exists()


def _write_damaged(path: Path, spec: ModelSpec, column: str) -> Path:
    """A trace with every column, in which one number of each request is none."""
    rng = np.random.default_rng(0)
    field = COLUMNS.get(column)
    with durable.staged_directory(path) as staged:
        writer = TraceWriter(staged, spec, KEEP, AHEAD)
        for request in range(4):
            name = {"dataset": "d", "task": "t", "prompt_id": str(request)}
            writer.add_request(request, **name, prompt_tokens=3, new_tokens=2)
            rows = make_rows(spec, 3, 2, request=request, first_forward=3 * request, rng=rng)
            if field is not None:
                getattr(rows, field)[4, 0] = np.nan
            writer.append(rows)
            for iteration in range(3):
                embedding_D = make_embedding(spec, request, rng)
                embedding_D[0] = np.nan if column == "embeddings" and iteration == 2 else 0
                writer.add_embedding(request, iteration, embedding_D)
        writer.finish(composition={"kind": "sequential"}, provenance={})
    return path


@every
def test_a_single_request_is_split_in_time(name: str, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", num_requests=1, prompt_tokens=8, new_tokens=20, keep=KEEP)
    card = train(name, trace, tmp_path / "out", fit=FitOptions(max_epochs=1))
    assert card["tokens"] == {"train": 20, "validation": 4}
    (own, *_) = evaluate([tmp_path / "out"], trace)
    assert (own.requests, own.num_tokens, own.prompt_prediction) == ("end", 4, None)


@pytest.mark.parametrize("name", [name for name in NAMES if CLASSES[name].predicts_prompts])
def test_what_is_predicted_adds_up_and_grows_with_the_prompt(name: str) -> None:
    spec = make_spec()
    predictor = _counted(name, spec)
    prompt = [3, 1, 4, 1, 5]
    scores_SLE, score_LE = predictor.predict_prompt(prompt)
    assert scores_SLE.shape == (5, 4, 8) and score_LE.shape == (4, 8)
    assert bool(scores_SLE.isfinite().all()) and bool(score_LE.isfinite().all())
    first_SLE = predictor.predict_prompt(prompt[:2])[0]
    torch.testing.assert_close(first_SLE, scores_SLE[:2])  # no token sees a later one
    for more in (0, 10):
        load_LE = predictor.workload(prompt, more)
        assert load_LE.min() >= 0
        np.testing.assert_allclose(load_LE.sum(axis=1), (5 + more) * 2)
    with refused(UsageError, "no tokens"):
        predictor.workload([])


@every
def test_learning_beats_guessing(name: str, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", num_requests=40, keep=KEEP)
    train(name, trace, tmp_path / "out", fit=FitOptions(max_epochs=10, batch_size=64))
    evaluation = evaluate([tmp_path / "out"], trace)[0]
    assert evaluation.scores[0].match > 1.2 * 2 / 8  # k / E is what a guess gets


@every
def test_a_trace_without_its_columns_is_refused(name: str, tmp_path: Path) -> None:
    missing = plugins.load("predictor", name).Predictor.needs - {"experts", "weights", "token_id"}
    trace = write_trace(tmp_path / "trace")
    if not missing:
        pytest.skip("top-k is enough")
    with pytest.raises(MismatchError, match=f"{name} needs .*capture with --keep topk,"):
        train(name, trace, tmp_path / "out")


@every
def test_routes_that_tell_no_hidden_size_are_refused_for_what_they_lack(name: str, tmp_path: Path) -> None:
    """As imported ones: chosen experts and weights alone."""
    spec = dataclasses.replace(make_spec(), hidden_size=0)
    routes = make_rows(make_spec(), 3, 3, request=0, first_forward=0, rng=np.random.default_rng(0))
    with durable.staged_directory(tmp_path / "trace") as staged:
        writer = TraceWriter(staged, spec, ["topk"])
        for request in range(4):
            told = {"dataset": "d", "task": "t", "prompt_id": str(request), "prompt_tokens": 3, "new_tokens": 3}
            writer.add_request(request, **told)
            number = np.full(6, request, np.int32)
            writer.append(replace(routes, request_T=number, forward_T=routes.iteration_T + 4 * request))
        writer.finish(composition={"kind": "sequential"}, provenance={})
    if CLASSES[name].needs <= {"experts", "weights", "token_id"}:
        train(name, tmp_path / "trace", tmp_path / "out", fit=FitOptions(max_epochs=1))
    else:
        with refused(MismatchError, name):
            train(name, tmp_path / "trace", tmp_path / "out")


@every
def test_another_models_trace_is_refused(name: str, tmp_path: Path) -> None:
    train(name, write_trace(tmp_path / "trace", keep=KEEP), tmp_path / "out", fit=FitOptions(max_epochs=1))
    other = write_trace(tmp_path / "other", make_spec(revision="b" * 64), keep=KEEP)
    with refused(MismatchError, "synthetic"):
        evaluate([tmp_path / "out"], other)


@learned
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    predictor_class = plugins.load("predictor", name).Predictor
    loss = predictor_class.loss
    monkeypatch.setattr(predictor_class, "loss", lambda *args: loss(*args) * value)
    with refused(MoetoolError, "finite", "number"):
        train(name, write_trace(tmp_path / "trace", keep=KEEP), tmp_path / "out", fit=FitOptions(max_epochs=2))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace"]


@learned
def test_interrupted_fitting_leaves_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(fitting.BestEpoch, "on_train_epoch_end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(name, write_trace(tmp_path / "trace", keep=KEEP), tmp_path / "out", fit=FitOptions(max_epochs=2))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace"]
    assert signal.getsignal(signal.SIGINT) == handler


@learned
def test_fitting_keeps_the_best_epoch_and_stops_early(name: str, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", keep=KEEP)
    fit = train(
        name, trace, tmp_path / "out", fit=FitOptions(max_epochs=60, max_tokens=32, patience=1, learning_rate=0.1)
    )["fit"]
    assert fit["tokens"] == 32
    assert fit["epochs"] == len(fit["validation_loss"]) < 60
    assert fit["best_epoch"] == 1 + int(np.argmin(fit["validation_loss"]))


@learned
def test_a_pass_shows_every_token_at_every_layer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer a token learned: as many batches as layers to predict, and no pair twice. All at once: one batch."""
    kind = plugins.load("predictor", name).Predictor
    loss, shown = kind.loss, []

    def noting(self: Predictor, tokens: Tokens, layer_N: torch.Tensor) -> torch.Tensor:
        if self.training:
            shown.append((tokens, layer_N))
        return loss(self, tokens, layer_N)

    monkeypatch.setattr(kind, "loss", noting)
    trace = write_trace(tmp_path / "trace", keep=KEEP)
    fit = train(name, trace, tmp_path / "out", fit=FitOptions(max_epochs=1, batch_size=1024))["fit"]
    later = Trace(trace).spec.num_layers - 1
    assert fit["pairs"] == fit["tokens"] * later
    assert fit["stopped_by"] == "max_epochs"
    assert len(shown) == (later if kind.one_layer else 1)
    if kind.one_layer:
        layers = torch.cat([layer_N for _, layer_N in shown])
        assert layers.bincount().tolist() == [0, *[fit["tokens"]] * later]
