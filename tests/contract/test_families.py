"""Every family: what is recorded is what is used, and an expert read from disk computes what one in memory does."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetool.base import plugins
from moetool.base.errors import MismatchError, UsageError
from moetool.base.families import FAMILIES, WITHIN_OTHERS, own_cache, resumes_cache
from moetool.base.types import ForwardInfo, ModelSpec, Phase
from moetool.caching.policy import Policy, build_policy, parse_options, policy_class
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.conversion import sources
from moetool.models.experts.expert_form import Call
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.families import router_rules
from moetool.models.loading import LoadedModel, load_full, load_lazy
from moetool.models.tested_formats import WITHIN_AND_RUN
from moetool.runtime import decoding
from moetool.runtime.decoding import Batch
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import ExpertStore, open_store
from moetool.runtime.loop.own_caches import open_batcher
from moetool.runtime.recording.recorder import GateRecorder
from moetool.runtime.request import Output, SamplingParams
from moetool.trace.rows import TokenBatch
from tests import families
from tests.engines import EventRecorder, RandomPolicy, WrongPrefetches, every_read_fails_once
from tests.greedy import generated, prompts, served
from tests.refusals import refused

SUPPORTED = sorted(name for name, family in FAMILIES.items() if not family.refused)
TOKENS = torch.tensor([[(7 * i + 3) % 60 + 3 for i in range(24)]])

ALL_POLICIES = ("dbrx", "deepseek_v3", "gpt_oss", "granitemoe", "jetmoe", "llama4_text", "mixtral", "qwen3_next")
"""One family for each way to call experts and for layers without them: a policy sees nothing else of a family."""

# llama4 runs every expert over every token, at weight 0 where it was not chosen: a product of another size.
OTHER_PRODUCTS = {"llama4_text"}


@dataclass
class Case:
    """A tiny model of one family, whole, with what its routers did on TOKENS."""

    name: str
    path: Path
    full: LoadedModel
    logits: torch.Tensor
    rows: TokenBatch

    def routes(self, layer: MoeLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Recorded experts [T, K], weights [T, K] and logits [T, E] of a layer."""
        spec, rows = self.full.spec, self.rows
        assert rows.weights_TS is not None and rows.logits_TF is not None
        top, wide = sum(spec.top_k_L[: layer.index]), sum(spec.num_experts_L[: layer.index])
        experts = torch.from_numpy(rows.experts_TS.astype("int64"))[:, top : top + layer.top_k]
        weights = torch.from_numpy(rows.weights_TS).float()[:, top : top + layer.top_k]
        logits = torch.from_numpy(rows.logits_TF).float()[:, wide : wide + layer.num_experts]
        return experts, weights, logits


@pytest.fixture(scope="module", params=SUPPORTED)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    path = tmp_path_factory.mktemp(request.param)
    families.save(request.param, path)
    full = load_full(Checkpoint.open(path), torch.float32)
    if full.layers[0].form.call is Call.INTERFACE:
        full.model.set_experts_implementation("eager")
    for parameter in full.model.parameters():
        parameter.data = parameter.data.clone()  # aligned, as slots are: kernels add in another order if not
    recorder = GateRecorder(full.model, full.layers, ["logits"])
    logits = _forward(full)
    rows, _ = recorder.take(_batch())
    recorder.close()
    yield Case(request.param, path, full, logits, rows)
    shutil.rmtree(path)


def _info() -> ForwardInfo:
    count = TOKENS.shape[1]
    return ForwardInfo(
        forward_id=0, request_T=(0,) * count, phase_T=(Phase.PREFILL,) * count, position_T=tuple(range(count))
    )


def _batch() -> Batch:
    return Batch(info=_info(), token_id_T=tuple(TOKENS[0].tolist()), iteration_T=(0,) * TOKENS.shape[1])


def _forward(loaded: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(TOKENS, use_cache=False).logits[0]
    return logits


@contextlib.contextmanager
def _lazy(path: Path, slots: int) -> Iterator[tuple[LoadedModel, ExpertRuntime]]:
    """The model with its experts on disk, and a pool of so many slots."""
    loaded = load_lazy(Checkpoint.open(path), torch.float32)
    assert loaded.files is not None
    store = ExpertStore(loaded.files, slots, num_threads=1)
    try:
        yield loaded, ExpertRuntime(loaded, Residency(build_policy("lru", loaded.spec, {}, slots)), store)
    finally:
        store.close()
        loaded.files.shards.close()


def _share_of(layer: MoeLayer, expert: int) -> list[torch.Tensor]:
    """One expert's numbers in the parameters of a whole model."""
    shares = []
    for part in layer.form.parts:
        size = torch.Size(part.share).numel()
        flat = [layer.experts.get_parameter(name).data.view(-1) for name in part.parameters]
        shares += [numbers[expert * size : (expert + 1) * size] for numbers in flat]
    return shares


def test_recorded_experts_are_those_that_compute(case: Case) -> None:
    """A change to an expert's weights changes the layer's output for the tokens that were recorded to use it."""
    layer = case.full.layers[-1]
    outputs: list[torch.Tensor] = []
    hook = layer.experts.register_forward_hook(lambda module, args, output: outputs.append(output.clone()))
    _forward(case.full)
    experts, weights, _ = case.routes(layer)
    for expert in range(layer.form.num_experts):
        shares = _share_of(layer, expert)
        before = [share.clone() for share in shares]
        for share in shares:
            share += 0.5
        _forward(case.full)
        for share, old in zip(shares, before, strict=True):
            share.copy_(old)
        changed = (outputs.pop() != outputs[0]).view(-1, TOKENS.shape[1], outputs[0].shape[-1]).any(-1).any(0)
        assert torch.equal(changed, ((experts == expert) & (weights != 0)).any(1)), expert
    hook.remove()
    assert experts.unique().numel() >= 2


def test_weights_follow_from_the_logits_by_the_declared_rule(case: Case) -> None:
    family = FAMILIES[case.name]
    for layer in case.full.layers:
        experts, weights, logits = case.routes(layer)
        rule = family.rule(case.full.model.config, layer.router)
        made = router_rules.weigh(rule, router_rules.scores(rule, logits), experts)
        agree = torch.allclose(made, weights, rtol=1e-2, atol=1e-3)
        assert agree != bool(family.exception), layer.layer_id


def test_spec_says_what_the_model_is(case: Case) -> None:
    spec, model = case.full.spec, case.full.model
    count = getattr(model.config, "num_layers", model.config.num_hidden_layers)
    assert set(range(count)) - set(spec.layer_ids_L) == families.DENSE_LAYERS.get(case.name, set())
    assert set(spec.num_experts_L) == {10 if case.name == "longcat_flash" else 8}
    assert set(spec.top_k_L) == {1 if case.name == "zaya" else 2}
    assert set(spec.expert_bytes_L) == {4 * case.full.layers[0].form.num_elements}
    whole = sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values()) * 4
    experts = sum(n * size for n, size in zip(spec.num_experts_L, spec.expert_bytes_L, strict=True))
    if case.name != "longcat_flash":  # its experts without weights have unused rows in memory
        assert Checkpoint.open(case.path).dense_bytes(torch.float32, "cuda") + experts == whole


def test_lazy_logits_are_those_of_the_whole_model(case: Case) -> None:
    with _lazy(case.path, slots=3) as (loaded, runtime):
        runtime.begin_forward(_info())
        found = _forward(loaded)
        runtime.end_forward()
    for name, buffer in loaded.model.named_buffers():
        assert torch.equal(buffer, case.full.model.get_buffer(name)), name
    error = (found - case.logits).abs().max().item()
    assert error <= (1e-6 * case.logits.abs().max().item() if case.name in OTHER_PRODUCTS else 0)
    assert loaded.spec == case.full.spec
    assert loaded.files is not None and loaded.files.slot_bytes == loaded.spec.slot_bytes


def test_dense_tensors_in_half_precision_are_those_of_transformers(case: Case) -> None:
    whole = load_full(Checkpoint.open(case.path), torch.bfloat16).model.state_dict()
    loaded = load_lazy(Checkpoint.open(case.path), torch.bfloat16)
    assert loaded.files is not None
    loaded.files.shards.close()
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.is_meta or (tensor.dtype == whole[name].dtype and torch.equal(tensor, whole[name])), name


def test_requests_get_the_tokens_of_generate(case: Case) -> None:
    prompts = [TOKENS[0, i : 5 + 9 * i].tolist() for i in range(3)]
    found: list[list[int]] = [[] for _ in prompts]
    with _lazy(case.path, slots=6) as (loaded, runtime):
        batcher = open_batcher(loaded.model, max_requests=3, kv_tokens=128)
        batcher.on_forward = lambda batch: runtime.begin_forward(batch.info)
        for i, prompt in enumerate(prompts):
            batcher.add(i, prompt, SamplingParams(max_tokens=6, ignore_eos=True))
        while not batcher.idle:
            for output in batcher.step():
                assert output.error is None, output.error
                assert output.token is not None
                found[output.request].append(output.token)
            runtime.end_forward()
        batcher.close()
    assert found == [_generated(case.full.model, prompt, 6) for prompt in prompts]
    assert batcher.max_requests == 3


def test_later_turns_of_a_chat_get_the_tokens_of_generate(case: Case) -> None:
    """For families whose requests have their own caches; paged ones: tests/e2e/test_prefix_caching.py.

    After three turns the client asks another last question, and then goes on after an answer of its own.
    """
    config = case.full.model.config.get_text_config()
    if not (own_cache(config) and resumes_cache(config)):
        pytest.skip("paged, or its cache takes no second prompt")
    more, params = TOKENS[0, 2:19].tolist(), SamplingParams(max_tokens=4, ignore_eos=True)
    batcher = open_batcher(case.full.model, max_requests=4, kv_tokens=4096, prefix_caching=True)

    def ask(prompt: list[int], reused: int) -> list[int]:
        batcher.add(0, prompt, params)
        outputs: list[Output] = []
        while not batcher.idle:
            outputs += batcher.step()
        made = _generated(case.full.model, prompt, 4)
        assert [output.token for output in outputs] == made
        assert outputs[0].reused == reused
        return prompt + made

    first = ask(TOKENS[0].tolist(), 0)
    second = ask(first + more, len(first) - 1)
    third = ask(second + more, len(second) - 1)
    last = (second[-1] + 1) % 60 + 3  # unlike the answer's last token
    ask([*second[:-1], last, *more[::-1]], len(second) - 1)
    asked = len(second) + len(more)
    ask([*third[:asked], (third[asked] + 1) % 60 + 3, *more], asked)
    batcher.close()


@pytest.mark.parametrize("name", ["afmoe", "cohere2_moe", "exaone_moe", "laguna", "mixtral", "phimoe", "qwen2_moe"])
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_windows_in_the_paged_cache_share_pages(name: str, fixed_shapes: bool, tmp_path: Path) -> None:
    """Prompts longer than a window of 16 reuse pages, and get the tokens of generate."""
    kinds = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]} if name == "laguna" else {}
    kinds |= {"use_sliding_window": True, "max_window_layers": 1} if name == "qwen2_moe" else {}
    families.save(name, tmp_path, sliding_window=16, **kinds)
    model = load_full(Checkpoint.open(tmp_path), torch.float32).model
    batcher = open_batcher(model, max_requests=2, kv_tokens=256, prefix_caching=True, first_kv_tokens=64)
    batcher.fixed_shapes = fixed_shapes
    found, reused, text = [], [], TOKENS[0].repeat(3).tolist()
    prompts = [text[start:end] for end in (40, 60, 52) for start in (0, 10)]
    for number, prompt in enumerate(prompts):
        batcher.add(number, prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        if number % 2:
            outputs: list[Output] = []
            while not batcher.idle:
                outputs += batcher.step()
            for request in (number - 1, number):
                mine = [output for output in outputs if output.request == request]
                reused.append(mine[0].reused)
                found.append([output.token for output in mine])
    batcher.close()
    assert found == [_generated(model, prompt, 8) for prompt in prompts]
    assert reused == [0, 0, 40, 28, 48, 40]
    assert model.config.get_text_config().sliding_window == 16


def test_a_prompt_in_chunks_gets_the_tokens_of_generate(case: Case) -> None:
    """For families whose requests have their own caches, while another request decodes."""
    config = case.full.model.config.get_text_config()
    if not (own_cache(config) and resumes_cache(config)):
        pytest.skip("paged, or its cache takes no second prompt")
    text, params = TOKENS[0].repeat(3).tolist(), SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [text, text[::-1]]
    batcher = open_batcher(case.full.model, max_requests=2, kv_tokens=256, max_prompt_wait_s=1e-6)
    sizes: list[int] = []
    batcher.on_forward = lambda batch: sizes.append(len(batch.token_id_T))
    batcher.add(0, prompts[0], params)
    outputs = batcher.step()
    batcher.add(1, prompts[1], params)
    while not batcher.idle:
        outputs += batcher.step()
    batcher.close()
    assert sizes[:3] == [len(text), 65, 1 + len(text) - 64]
    for request, prompt in enumerate(prompts):
        made = _generated(case.full.model, prompt, 6)
        assert [one.token for one in outputs if one.request == request] == made


def test_scores_in_pieces_are_those_of_a_whole_forward(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PIECE_BYTES", 7 * 4 * case.full.model.config.get_text_config().vocab_size)
    prompt = TOKENS[0].tolist()
    pieces = list(decoding.score_prompt(case.full.model, 0, prompt, 0, None))
    assert [len(piece) for piece in pieces[:-1]] == [7] * ((len(prompt) - 1) // 7)
    assert torch.allclose(torch.cat(pieces), case.logits, atol=1e-5)


def _generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """The next tokens by transformers' `generate`."""
    made = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    return made[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _decode(
    path: Path, policy: Callable[[ModelSpec], Policy], failing: bool = False
) -> tuple[Policy, list[torch.Tensor]]:
    """Two requests at once where the family can, from the pool of a policy: the policy, and every forward's logits."""
    logits: list[torch.Tensor] = []
    loaded = load_lazy(Checkpoint.open(path), torch.float32)
    assert loaded.files is not None
    made = policy(loaded.spec)
    residency = Residency(made)
    store = open_store(loaded, residency, num_threads=1)
    runtime = ExpertRuntime(loaded, residency, store)
    with contextlib.ExitStack() as stack:
        stack.callback(loaded.files.shards.close)
        stack.callback(runtime.close)
        tries = stack.enter_context(every_read_fails_once(loaded.files)) if failing else None
        head = loaded.model.get_output_embeddings()
        head.register_forward_hook(lambda module, args, output: logits.append(output.clone()))
        batcher = open_batcher(loaded.model, max_requests=2, kv_tokens=64)
        stack.callback(batcher.close)
        batcher.on_forward = lambda batch: runtime.begin_forward(batch.info)
        for i, prompt in enumerate((TOKENS[0, :7].tolist(), TOKENS[0, 9:12].tolist())):
            batcher.add(i, prompt, SamplingParams(max_tokens=3, ignore_eos=True))
        while not batcher.idle:
            for output in batcher.step():
                assert output.error is None, output.error
            runtime.end_forward()
        assert tries is None or (store.stats.retried == len(tries) > 0 and min(tries.values()) > 1)
    return made, logits


def test_no_eviction_prefetch_or_failed_read_changes_a_bit(case: Case) -> None:
    seen, expected = _decode(case.path, lambda spec: EventRecorder(spec, spec.total_experts))
    assert isinstance(seen, EventRecorder)
    for seed, slots in ((1, 2), (2, 5), (3, 11)):
        assert _same(_decode(case.path, lambda spec, a=(slots, seed): RandomPolicy(spec, *a))[1], expected)  # type: ignore[misc]
    perverse, found = _decode(case.path, lambda spec: WrongPrefetches(spec, 9, seen))
    assert isinstance(perverse, WrongPrefetches) and perverse.wrong and _same(found, expected)
    assert _same(_decode(case.path, lambda spec: EventRecorder(spec, 4), failing=True)[1], expected)


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_no_policy_changes_a_bit(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path)
    _, expected = _decode(tmp_path, lambda spec: build_policy("lru", spec, {}, spec.total_experts))
    for policy in plugins.names("policy"):
        kind = policy_class(policy)
        if kind.needs_future or not kind.lossless:
            continue

        def built(spec: ModelSpec, policy: str = policy, kind: type[Policy] = kind) -> Policy:
            slots = max(6, kind.min_slots(spec, parse_options(policy, {})))
            return build_policy(
                policy, spec, {}, slots, predictor=families.counted(spec) if kind.needs_predictor else None
            )

        assert _same(_decode(tmp_path, built)[1], expected), policy


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_missing_tensor_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    tensors = load_file(case.path / "model.safetensors")
    layer = case.full.layers[-1]
    made_of = sources(case.full.model, tensors)
    for name in (f"{layer.path}.{layer.form.parameters[-1]}", _dense_name(case.full)):
        tensor = next(reversed(made_of[name].names.values()))[-1]
        path = tmp_path / name
        path.mkdir()
        shutil.copy(case.path / "config.json", path)
        save_file({k: v for k, v in tensors.items() if k != tensor}, path / "model.safetensors")
        with pytest.raises(MismatchError, match=f"({re.escape(tensor)}|{re.escape(name)})"):
            load_lazy(Checkpoint.open(path), torch.float32)


def _dense_name(full: LoadedModel) -> str:
    """A weight that is no expert's: the router's."""
    router = next(path for path, module in full.model.named_modules() if module is full.layers[-1].router)
    return next(name for name, _ in full.model.named_parameters() if name.startswith(f"{router}."))


@pytest.mark.parametrize("name", families.MULTIMODAL)
def test_the_text_part_of_a_model_that_sees_is_read(name: str, tmp_path: Path) -> None:
    families.require_known(name)
    model = families.save_multimodal(name, tmp_path)
    if name == "llama4":  # transformers 5.24 reads a field that its text part's output lacks
        model = model.get_submodule("language_model")
    with torch.inference_mode():
        expected = model(input_ids=TOKENS, use_cache=False).logits[0]
    with _lazy(tmp_path, slots=3) as (loaded, runtime):
        runtime.begin_forward(_info())
        found = _forward(loaded)
    assert loaded.spec.name.startswith(families.MULTIMODAL[name])
    assert torch.allclose(found, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_the_text_part_of_a_model_that_sees_is_served(tmp_path: Path) -> None:
    """Experts lie transposed in the file, as in published ones of this family."""
    model = families.save_multimodal("qwen3_vl_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: t.mT.contiguous() if ".mlp.experts." in name else t for name, t in tensors.items()}
    assert turned["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 32, 48)
    save_file(turned, tmp_path / "model.safetensors", {"format": "pt"})
    greedy = generated(model, prompts(3))
    greedy.require_same(served(tmp_path, "lru", prompts(3)))
    greedy.require_same(served(tmp_path, "lru", prompts(3), products=False))
    full = load_full(Checkpoint.open(tmp_path), torch.float32)
    with torch.inference_mode():
        expected, found = (m(input_ids=TOKENS, use_cache=False).logits for m in (model, full.model))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


def test_the_families_within_others_are_those_tested() -> None:
    tested = {text for name, text in families.MULTIMODAL.items() if text not in FAMILIES}
    assert tested == {*WITHIN_AND_RUN, "qwen4_exp_text"} and {*WITHIN_AND_RUN} < {*WITHIN_OTHERS}


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if family.refused))
def test_families_that_cannot_run_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "auto_map": {"AutoModel": "x.X"}}))
    with pytest.raises(UsageError, match=f"{name} models are not supported: "):
        _ = Checkpoint.open(tmp_path).spec


def test_code_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "my_moe", "auto_map": {"AutoModel": "x.X"}}))
    with refused(UsageError, "moetool", "never", "runs"):
        _ = Checkpoint.open(tmp_path).spec


def test_unknown_quantizations_are_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "made_up"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(UsageError, "made_up"):
        _ = Checkpoint.open(tmp_path).spec


def test_every_moe_family_of_the_table_has_a_tiny_model() -> None:
    for name in SUPPORTED:
        assert families.config(name).model_type == name
