"""Decode steps as programs in an engine: the tokens of the modules, under any policy, with and without observers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moetool
from moetool.caching.plan import CachePlan
from moetool.kernels.cpu.vectors import has_features
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.moe_layers import moe_layers
from moetool.runtime.loop import batching
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.engine import Engine
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.steps.recorded_steps import MOST_ROWS, RecordedSteps
from tests import families
from tests.frozen import runs
from tests.quantized import mxfp4_experts

_LAYERS = 3
_WIDTHS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32} | {
    "moe_intermediate_size": 64,
    "num_hidden_layers": _LAYERS,
}
_PROMPTS = [[(7 * i + 3 * k) % 60 + 3 for i in range(9 + k)] for k in range(3)]
_NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model stored in bfloat16, so that slots hold what compiled functions multiply by."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("model")
    families.save("qwen3_moe", path, std=0.15, **_WIDTHS)
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    for file in runs.REFERENCE.glob("token*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss with biases, sinks, and windows in every second layer; experts in MXFP4 (as released) or bfloat16."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("gpt_oss")
    widths = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    families.save("gpt_oss", path / "float32", std=0.15, head_dim=32, sliding_window=6, **widths)
    model = AutoModelForCausalLM.from_pretrained(path / "float32", dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(path / "bfloat16")
    mxfp4_experts(path / "bfloat16", path / "mxfp4")
    for file in runs.REFERENCE.glob("token*"):
        for form in ("mxfp4", "bfloat16"):
            shutil.copy(file, path / form)
    return path


def _engine(path: Path, policy: str = "lru", slots: int | None = None, **options: Any) -> Engine:
    checkpoint = Checkpoint.open(path)
    given: dict[str, Any] = {"dtype": "bfloat16", "kv_tokens": 512, "max_requests": MOST_ROWS + 2, "threads": 1}
    given |= {"io_threads": 1, "oracle_s": 0.0, "warm_start": False, "max_prompt_wait": 0.0, **options}
    plan = None
    if slots is not None:
        plan = CachePlan(
            spec=checkpoint.spec,
            policy=policy,
            slots=slots,
            device_memory_bytes=2**36,
            dense_bytes=2**34,
            kv_bytes=2**30,
            kv_tokens=512,
            dtype="bfloat16",
            budget_bytes=2**35,
            predictor=None,
            trace_sha256="0" * 64,
            requests_used=(0,),
            requests_held_out=(),
            evidence=(),
            reason="made",
            options={},
            prefetch_distance=0,
            predictor_bytes=0,
        )
    engine = moetool.build_engine(checkpoint, options=moetool.ServeOptions(**given), plan=plan, policy=policy)
    engine.state = "ready"
    return engine


def _recorded(engine: Engine) -> RecordedSteps:
    assert isinstance(engine.batcher, Batcher) and engine.batcher.recorded is not None
    return engine.batcher.recorded


def _generate(
    engine: Engine, prompts: list[list[int]] = _PROMPTS, between: Callable[[int], None] = lambda step: None
) -> list[list[int | None]]:
    outputs: list[list[Output]] = [[] for _ in prompts]
    for prompt, sink in zip(prompts, outputs, strict=True):
        engine.submit(prompt, SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True), sink.append)
    step = 0
    while not all(sink and sink[-1].finish for sink in outputs):
        between(step)
        engine.step()
        step += 1
    assert not any(output.error for sink in outputs for output in sink)
    return [[output.token for output in sink if output.token is not None] for sink in outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int | None]]:
    """The tokens of the modules."""
    engine = _engine(model)
    _recorded(engine).refused = "to be compared with"
    tokens = _generate(engine)
    assert _recorded(engine).steps == 0
    engine.close()
    return tokens


@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        *(("lru", None), ("lru", 20), ("lru", 4), ("lru", 3), ("lfu", 12), ("on_demand", 9), ("layerwise", 10)),
        *(("foresight", 9), ("finemoe", 9), ("hybrimoe", 9), ("moe_infinity", 9), ("moesys", 16)),
        ("static_split", 9),
    ],
)
def test_tokens_are_those_of_the_modules(
    model: Path, expected: list[list[int | None]], policy: str, slots: int | None
) -> None:
    engine = _engine(model, policy, slots)
    assert _generate(engine) == expected
    assert _recorded(engine).steps == _NEW_TOKENS - 1
    stats = engine.stats()
    assert stats["recorded_steps"]["refused"] is None
    assert stats["kernels"]["few_rows"]["bfloat16"] in (0, 2048)
    compiled = ("AMX tiles", "avx512_bf16", "AVX-512 in float32", "AVX2 in float32")
    assert (stats["kernels"]["more_rows"] in compiled) == has_features("avx2", "fma")
    engine.close()


@pytest.mark.parametrize(
    ("policy", "slots"), [("lru", None), ("lru", 12), ("lru", 3), ("foresight", 9), ("hybrimoe", 9)]
)
@pytest.mark.parametrize("form", ["mxfp4", "bfloat16"])
def test_gpt_oss_has_the_tokens_of_its_modules(gpt_oss: Path, form: str, policy: str, slots: int | None) -> None:
    made = []
    for refused in ("", "to be compared with"):
        engine = _engine(gpt_oss / form, policy, slots)
        assert all(engine.runtime.native_weights(layer) for layer in moe_layers(engine.batcher.model))
        assert not _recorded(engine).refused
        _recorded(engine).refused = refused
        made.append(_generate(engine))
        assert _recorded(engine).steps == (0 if refused else _NEW_TOKENS - 1)
        engine.close()
    assert made[0] == made[1]


@pytest.mark.parametrize(("policy", "slots"), [("lru", 9), ("foresight", 9), ("finemoe", 9)])
def test_decisions_are_those_of_the_modules(model: Path, policy: str, slots: int) -> None:
    counts = []
    for refused in ("", "to be compared with"):
        engine = _engine(model, policy, slots)
        _recorded(engine).refused = refused
        _generate(engine)
        found = engine.residency.counts
        counts.append((found.kept, found.prefetched, found.missed, found.hosted, found.wasted))
        engine.close()
    assert counts[0] == counts[1]


def test_a_step_is_one_call_where_every_expert_has_its_slot(model: Path) -> None:
    engine = _engine(model)
    recorded = _recorded(engine)
    _generate(engine)  # loads what these prompts need
    steps, calls, misses = recorded.steps, recorded.calls, engine.metrics()["misses"]
    _generate(engine)
    assert engine.metrics()["misses"] == misses
    assert recorded.calls - calls == recorded.steps - steps == _NEW_TOKENS - 1
    engine.close()


@pytest.mark.parametrize(("policy", "slots"), [("lru", 9), ("foresight", 16)])
def test_a_step_with_misses_is_at_most_one_call_for_each_layer_and_one(model: Path, policy: str, slots: int) -> None:
    engine = _engine(model, policy, slots)
    _generate(engine, _PROMPTS[:1])
    recorded = _recorded(engine)
    assert engine.metrics()["misses"]
    assert recorded.calls <= recorded.steps * (_LAYERS + 1)
    engine.close()


def test_hooks_may_come_and_go_between_two_tokens(model: Path, expected: list[list[int | None]]) -> None:
    engine = _engine(model)
    layer, runtime, recorded = moe_layers(engine.batcher.model)[1], engine.runtime, _recorded(engine)
    seen: dict[str, list[Any]] = {"router": [], "experts": [], "products": []}
    handles: list[Any] = []

    def between(step: int) -> None:
        if step == 3:
            handles.append(
                layer.router.register_forward_hook(lambda m, a, output: seen["router"].append(output[0].clone()))
            )
            handles.append(
                layer.experts.register_forward_pre_hook(
                    lambda m, args: seen["experts"].append([a.clone() for a in args])
                )
            )
            handles.append(runtime.watch_products(layer, lambda products: seen["products"].append(products.clone())))
        if step == 5:
            while handles:
                handles.pop().remove()

    assert _generate(engine, between=between) == expected
    assert [len(found) for found in seen.values()] == [2, 2, 2]
    for logits, (hidden, index, weights), products in zip(*seen.values(), strict=True):
        probabilities = logits.softmax(-1, dtype=torch.float32)
        assert torch.equal(index.sort().values, probabilities.topk(2).indices.sort().values)
        assert products.shape == (*weights.shape, hidden.shape[-1])
    assert recorded.steps == _NEW_TOKENS - 1
    engine.close()


def test_a_hook_elsewhere_runs_the_modules_meanwhile(model: Path, expected: list[list[int | None]]) -> None:
    engine = _engine(model)
    seen: list[Any] = []
    module = engine.batcher.model.model.layers[0].self_attn.o_proj
    handles: list[Any] = []

    def between(step: int) -> None:
        if step == 2:
            handles.append(module.register_forward_hook(lambda *given: seen.append(given)))
        if step == 4:
            handles.pop().remove()

    assert _generate(engine, between=between) == expected
    assert len(seen) == 2
    assert _recorded(engine).steps == _NEW_TOKENS - 3
    engine.close()


def test_a_short_prompt_of_a_narrow_model_runs_on_one_thread(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "NARROW_ROWS", len(_PROMPTS[0]))
    before, seen = torch.get_num_threads(), []
    engine = _engine(model, threads=2)
    handle = engine.batcher.model.model.register_forward_pre_hook(lambda *given: seen.append(torch.get_num_threads()))
    try:
        for prompt in _PROMPTS[:2]:
            _generate(engine, [prompt])
            assert torch.get_num_threads() == 2
    finally:
        handle.remove()
        engine.close()
        torch.set_num_threads(before)
    assert (seen[0], seen[_NEW_TOKENS]) == (1, 2)


def test_more_rows_than_a_program_takes_run_the_modules(model: Path) -> None:
    engine = _engine(model)
    _generate(engine, [[3 + k, 5, 8] for k in range(MOST_ROWS + 1)])
    assert _recorded(engine).steps == 0
    _generate(engine, [[3 + k, 5, 8] for k in range(MOST_ROWS)])
    assert _recorded(engine).steps == _NEW_TOKENS - 1
    engine.close()


def test_another_type_is_refused_and_said(model: Path) -> None:
    engine = _engine(model, dtype="float32")
    _generate(engine, _PROMPTS[:1])
    assert "float32" in engine.stats()["recorded_steps"]["refused"]
    assert _recorded(engine).steps == 0
    engine.close()
