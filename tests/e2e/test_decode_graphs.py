"""Decode steps by recorded graphs, on a CPU by a stand-in: the tokens, routes and counts of single launches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import MoetoolError
from moetool.models.checkpoint import Checkpoint
from moetool.runtime import decode_graphs
from moetool.runtime.request import SamplingParams
from tests import families
from tests.engines import engine
from tests.graphs import StandInGraph, stand_in

TEXTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 =", "word " * 130]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def _open(model: Path, tokenizer: Any, policy: str, slots: int, *, by_graphs: bool = True, **options: Any) -> Any:
    made = engine(model, tokenizer, policy, slots, pooled=True, **options)
    made.batcher.fixed_shapes = True
    if by_graphs:
        bound = [m.moetool_binding[1] for m in made.batcher.model.modules() if hasattr(m, "moetool_binding")]
        made.batcher.record_steps(bound, made.runtime)
    return made


def _ids(tokenizer: Any) -> list[list[int]]:
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    return [*ids[:4], ids[4][:250]]  # the last needs room for more keys while it decodes


def _run(
    made: Any, prompts: list[list[int]], watched: int | None = None, steps: int = 10_000
) -> tuple[list[Any], torch.Tensor]:
    """Tokens and log-probabilities of requests that end one by one."""
    outputs: list[list[Any]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=6 + 3 * i, ignore_eos=True, logprobs=3, return_routes=i == watched)
        made.submit(prompt, params, outputs[i].append)
    while not made.idle and steps:
        made.step()
        steps -= 1
    flat = [output for its in outputs for output in its]
    said = [(o.request, o.token, o.error, o.experts_THK is None or o.experts_THK.tolist()) for o in flat]
    return said, torch.tensor([[value for _, value in output.logprob.top] for output in flat if output.logprob])


@pytest.mark.parametrize(
    ("policy", "slots", "watched"),
    [
        ("lru", 40, None),
        ("lru", 256, 1),
        ("foresight", 64, None),
        ("finemoe", 64, None),
        ("smoe", 64, 1),
    ],
)
def test_recorded_steps_give_what_single_launches_give(
    policy: str, slots: int, watched: int | None, reference: Path, tokenizer: Any, tmp_path: Path
) -> None:
    found = []
    for by_graphs in (False, True):
        made = _open(reference, tokenizer, policy, slots, by_graphs=by_graphs, log=tmp_path / str(by_graphs))
        said, logprobs = _run(made, _ids(tokenizer), watched)
        if by_graphs:
            assert made.batcher.graphs.num_recorded >= 3
        counts = made.residency.counts
        found.append(([counts.needed, counts.kept, counts.missed], said, logprobs))
        made.close()
    assert found[1][:2] == found[0][:2]
    # While torch is listened to it takes other kernels on a CPU.
    torch.testing.assert_close(found[1][2], found[0][2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v2", "cohere2_moe", "exaone_moe", "granitemoe", "dbrx", "longcat_flash"])
@pytest.mark.parametrize("slots", [6, None])
def test_steps_of_a_family_are_recorded(family: str, slots: int | None, tmp_path: Path) -> None:
    families.save(family, tmp_path)
    spec = Checkpoint.open(tmp_path).spec
    prompts = [[(7 * i + 3) % 60 + 3 for i in range(24)], [5, 9, 11]]
    found = []
    for by_graphs in (False, True):
        made = _open(tmp_path, None, "lru", slots or spec.total_experts, by_graphs=by_graphs)
        found.append(_run(made, prompts))
        if by_graphs:
            assert made.batcher.graphs.num_recorded >= 2
        made.close()
    assert found[1][0] == found[0][0]
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def expected(reference: Path, tokenizer: Any) -> Any:
    made = _open(reference, tokenizer, "lru", 40, by_graphs=False)
    found, _ = _run(made, _ids(tokenizer))
    made.close()
    return found


def test_the_oldest_graphs_give_way(
    expected: Any, reference: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "MOST_PROGRAMS", 2)
    made = _open(reference, tokenizer, "lru", 40)
    for first in (0, 5):
        found, _ = _run(made, _ids(tokenizer))
        assert [(request - first, *rest) for request, *rest in found] == expected
        assert made.batcher.graphs.num_recorded == 2
    made.close()


def test_a_step_that_cannot_be_recorded_runs_without_graphs(
    expected: Any, reference: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = _open(reference, tokenizer, "lru", 256)

    def refuse(graph: StandInGraph, **arguments: Any) -> None:
        raise ValueError("no such operation while a stream is captured")

    monkeypatch.setattr(StandInGraph, "capture_begin", refuse)
    found, _ = _run(made, _ids(tokenizer))
    assert found == expected
    assert made.batcher.graphs.num_recorded == 0
    assert caplog.text.count("decode steps run without CUDA graphs: no such operation") == 1
    made.close()


def test_a_replay_that_fails_costs_its_requests_only(
    expected: Any, reference: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _open(reference, tokenizer, "lru", 40)
    _run(made, _ids(tokenizer)[:3])
    assert made.batcher.graphs.num_recorded > 0
    ready, left = made.store.ready, 400

    def fails_once(key: int, slot: int) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise MoetoolError("the disk is gone")
        return ready(key, slot)

    monkeypatch.setattr(made.store, "ready", fails_once)
    failed, _ = _run(made, _ids(tokenizer))
    assert {error for _, _, error, _ in failed if error} == {"the disk is gone"}
    found, _ = _run(made, _ids(tokenizer))
    assert [(request - 8, *rest) for request, *rest in found] == expected
    made.close()
