"""What every predictor in predictors/ owes its callers."""

import dataclasses
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool import fitting, plugins
from moetool.errors import MoetoolError, UsageError
from moetool.evaluation import evaluate
from moetool.predictor import Predictor, build, load_predictor
from moetool.trace import Trace
from moetool.training import train
from moetool.types import ForwardInfo, GateEvent, ModelSpec
from tests.synthetic_routes import make_routes, make_spec, write_trace

NAMES = plugins.names("predictor")
LEARNED = [name for name in NAMES if plugins.load("predictor", name).Predictor.learned]
SHAPES = [(2, 2, 1), (3, 5, 5), (4, 8, 2), (5, 130, 6)]

every = pytest.mark.parametrize("name", NAMES)
learned = pytest.mark.parametrize("name", LEARNED)


def _counted(name: str, spec: ModelSpec, num_tokens: int = 16) -> tuple[Predictor, torch.Tensor]:
    torch.manual_seed(0)
    routes_NLK = make_routes(spec, num_tokens, 0, np.random.default_rng(0))
    predictor = build(name, spec).eval().requires_grad_(False)
    predictor.count(routes_NLK)
    return predictor, torch.from_numpy(routes_NLK)


@every
def test_module_exports_options_and_predictor(name: str) -> None:
    module = plugins.load("predictor", name)
    assert issubclass(module.Predictor, Predictor)
    assert module.Options.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(module.Options))
    assert module.Options() == module.Options()  # every option has a default
    assert module.__doc__ and "Source:" in module.__doc__


@every
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_have_the_shape_of_the_experts(name: str, shape: tuple[int, int, int]) -> None:
    num_layers, num_experts, _ = shape
    predictor, routes_NLK = _counted(name, make_spec(*shape))
    for layer in range(1, num_layers):
        scores_TE = predictor.layer_scores(routes_NLK[:, :layer], layer)
        assert scores_TE.shape == (16, num_experts)
        assert scores_TE.dtype == torch.float32
        assert scores_TE.isfinite().all()


@every
def test_a_prediction_sees_no_other_token(name: str) -> None:
    predictor, routes_NLK = _counted(name, make_spec())
    for layer in range(1, 4):
        scores_TE = predictor.layer_scores(routes_NLK[:, :layer], layer)
        for token in range(4):
            alone_1E = predictor.layer_scores(routes_NLK[token : token + 1, :layer], layer)
            torch.testing.assert_close(alone_1E[0], scores_TE[token], rtol=1e-4, atol=1e-5)


@every
def test_scores_follow_what_was_observed_and_not_what_comes_later(name: str) -> None:
    predictor, routes_NLK = _counted(name, make_spec())
    for forward, rows in enumerate((slice(0, 5), slice(5, 6))):  # a prompt, then a decode step
        path_TLK = routes_NLK[rows]
        count = len(path_TLK)
        info = ForwardInfo(
            forward_id=forward, request_T=(0,) * count, phase_T=(forward,) * count, position_T=tuple(range(count))
        )
        for layer in range(4):
            chosen = tuple(map(tuple, path_TLK[:, layer].tolist()))
            predictor.observe(GateEvent(forward=info, layer=layer, experts_TK=chosen))
            for coming in range(1, min(layer + 2, 4)):  # the next layer, and those that are past by now
                expected_TE = predictor.layer_scores(path_TLK[:, :coming], coming)
                np.testing.assert_array_equal(predictor.scores(coming), expected_TE)


@every
def test_unequal_layers_are_refused(name: str) -> None:
    spec = dataclasses.replace(make_spec(num_layers=3), num_experts_L=(8, 8, 16))
    with pytest.raises(UsageError, match="choose 2 of 8, 2 of 16 experts"):
        build(name, spec)


@every
def test_trained_saved_and_loaded(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Deterministic under a seed, silent, bit-identical after loading, and leaving the caller's randomness alone."""
    trace = write_trace(tmp_path / "trace")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    cards = [
        train(name, trace, tmp_path / out, max_epochs=2, seed=seed) for out, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert torch.equal(torch.rand(3), expected)
    assert capfd.readouterr() == ("", "")
    assert cards[0]["weights"] == cards[1]["weights"] != cards[2]["weights"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "c", "trace"]
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == ["README.md", "card.json", "predictor.safetensors"]

    first, second = load_predictor(tmp_path / "a"), load_predictor(tmp_path / "b")
    assert (first.name, first.spec) == (name, Trace(trace).spec)
    assert not first.training
    routes_NLK = torch.from_numpy(make_routes(first.spec, 8, 0, np.random.default_rng(3)))
    for layer in range(1, 4):
        scores = [p.layer_scores(routes_NLK[:, :layer], layer) for p in (first, second)]
        assert torch.equal(*scores)
    (own, *_) = evaluate([tmp_path / "a"], trace)
    assert own.predictor == name


@every
def test_learning_beats_guessing(name: str, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", num_requests=40)
    train(name, trace, tmp_path / "out", max_epochs=10, batch_size=64)
    evaluation = evaluate([tmp_path / "out"], trace)[0]
    assert evaluation.scores[0].match > 1.2 * 2 / 8  # k / E is what a guess gets


@learned
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    predictor_class = plugins.load("predictor", name).Predictor
    loss = predictor_class.loss
    monkeypatch.setattr(predictor_class, "loss", lambda *args: loss(*args) * value)
    with pytest.raises(MoetoolError, match="expected a finite number"):
        train(name, write_trace(tmp_path / "trace"), tmp_path / "out", max_epochs=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace"]


@learned
def test_interrupted_fitting_leaves_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(fitting._Best, "on_train_epoch_end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(name, write_trace(tmp_path / "trace"), tmp_path / "out", max_epochs=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace"]
    assert signal.getsignal(signal.SIGINT) == handler


@learned
def test_fitting_keeps_the_best_epoch_and_stops_early(name: str, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    fit = train(name, trace, tmp_path / "out", max_epochs=60, max_tokens=32, patience=1, learning_rate=0.1)["fit"]
    assert fit["tokens"] == 32
    assert fit["epochs"] == len(fit["validation_loss"]) < 60
    assert fit["best_epoch"] == 1 + int(np.argmin(fit["validation_loss"]))
