"""Attention over latents: the numbers of transformers' expanded form, in pages of one row per token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DeepseekV3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from moetool.cli.guide import topics
from moetool.kernels.cpu import step_operations
from moetool.kernels.cpu.attention import OneQuery, attend_one_query
from moetool.kernels.cpu.program import Program
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full
from moetool.runtime.decoding import is_indexed, kv_cache_bytes, row_shapes
from moetool.runtime.kv import indexed
from moetool.runtime.kv import paged_attention as paged_attention_module
from moetool.runtime.kv.latents import Expansion, attend_to_rows, keep_latents
from moetool.runtime.kv.paged_attention import attend, paged_attention
from moetool.runtime.kv.pages import KvBatch
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.request import Output, SamplingParams
from tests import families

TEXT = [(7 * i + 3) % 60 + 3 for i in range(90)]
POSITIONS = 1000


SHARED = {"indexer_types": ["full", "shared", "full"]}
INDEX_WIDTHS = {"deepseek_v32": [16, 16, 16], "glm_moe_dsa": [16, 0, 16]}


@pytest.fixture(params=["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    families.save(request.param, tmp_path, **(SHARED if request.param == "glm_moe_dsa" else {}))
    return load_full(Checkpoint.open(tmp_path), torch.float32).model


def _run(batcher: Batcher, prompts: list[list[int]], count: int = 6) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        batcher.add(number, prompt, SamplingParams(max_tokens=count, ignore_eos=True))
    while not batcher.idle:
        for output in batcher.step():
            assert output.error is None and output.token is not None, output.error
            tokens[output.request].append(output.token)
    return tokens


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_logits_are_those_of_the_expanded_form(model: Any, fixed_shapes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts in chunks of 24, and answers together; one query is scored, and fewer than 24 attend, at once."""
    monkeypatch.setattr(indexed, "MOST_SCORES", 500)
    made: list[torch.Tensor] = []
    batcher = Batcher(model, max_requests=2, kv_tokens=256, max_batch_tokens=24)
    batcher.fixed_shapes = fixed_shapes and not is_indexed(model.config)
    hook = model.lm_head.register_forward_hook(lambda module, args, output: made.append(output[0].clone()))
    prompts = [TEXT[:40], TEXT[40:70]]
    answers = _run(batcher, prompts)
    hook.remove()
    batcher.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        for row in expected:
            nearest = min(float((row - other).abs().max()) for logits in made for other in logits)
            assert nearest < 1e-4


def test_pages_hold_one_row_per_token_and_prefixes_share_them(model: Any) -> None:
    config = model.config.get_text_config()
    shapes = row_shapes(config)
    assert {tuple(shape)[:3] for shape in shapes} == {(1, 16 + 8, 0)}
    assert [shape.index_width for shape in shapes] == INDEX_WIDTHS.get(config.model_type, [0] * len(shapes))
    batcher = Batcher(model, max_requests=2, kv_tokens=256, prefix_caching=True)
    assert batcher.kv_bytes == kv_cache_bytes(config, torch.float32, 256)
    first = _run(batcher, [TEXT[:50]])
    batcher.add(7, TEXT[:48] + TEXT[60:80], SamplingParams(max_tokens=6, ignore_eos=True))
    batcher.step()
    batcher.cancel(7)  # its pages are taken back
    reused: list[Output] = []
    batcher.add(0, TEXT[:50], SamplingParams(max_tokens=6, ignore_eos=True))
    while not batcher.idle:
        reused += batcher.step()
    batcher.close()
    assert reused[0].reused == 48 and [output.token for output in reused] == first[0]


def test_closing_gives_the_model_its_own_attention_back(model: Any) -> None:
    with torch.inference_mode():
        before = model(torch.tensor([TEXT]), use_cache=False).logits
        Batcher(model, max_requests=1, kv_tokens=64).close()
        assert torch.equal(model(torch.tensor([TEXT]), use_cache=False).logits, before)
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_a_forward_without_its_batch_is_refused(model: Any) -> None:
    undo = keep_latents(model)
    module = next(module for module in model.modules() if hasattr(module, "kv_b_proj"))
    with pytest.raises(RuntimeError, match=type(module).__name__):
        paged_attention(module, *(torch.zeros(1, 1, 2, 8) for _ in range(3)), None)
    undo()


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_the_compiled_kernel_computes_a_batch_as_torch_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attention of a run, prompts beside answers, computed both ways from the same pages."""
    families.save(family, tmp_path, kv_lora_rank=24)
    model = load_full(Checkpoint.open(tmp_path), torch.bfloat16).model
    attended, compiled = paged_attention_module.attend_latents, paged_attention_module.compiled_for_rows
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def twice(*arguments: Any) -> torch.Tensor:
        batch = arguments[4]
        assert isinstance(batch, KvBatch)
        made = attended(*arguments)
        if batch.spans(None, True).singles:
            monkeypatch.setattr(paged_attention_module, "compiled_for_rows", lambda *given: False)
            pairs.append((made, attended(*arguments)))
            monkeypatch.setattr(paged_attention_module, "compiled_for_rows", compiled)
        return made

    monkeypatch.setattr(paged_attention_module, "attend_latents", twice)
    batcher = Batcher(model, max_requests=3, kv_tokens=512, max_batch_tokens=32)
    _run(batcher, [TEXT[:70], TEXT[30:80], TEXT[10:20]], 12)
    batcher.close()
    assert len(pairs) >= 3 * 11
    for one, other in pairs:
        assert float((one - other).float().abs().max()) <= 2**-7 * float(other.float().abs().max())


@pytest.fixture(scope="module")
def layer() -> Iterator[tuple[DeepseekV3Attention, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """DeepSeek-V3's widths with four heads: the module, queries, latents with rotary keys, and its float32 output."""
    torch.manual_seed(0)
    AttentionInterface.register("kept_by_a_test", _keep)
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
    }
    config = DeepseekV3Config(**sizes, max_position_embeddings=2048, attn_implementation="kept_by_a_test")
    module = DeepseekV3Attention(config, 0).eval()
    for parameter in module.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        parameter.data = torch.randn_like(parameter) * scale + (parameter.dim() == 1)
    hidden = torch.randn(1, POSITIONS, 256)
    cos, sin = DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(POSITIONS)[None])
    yield module, hidden, cos, sin


GIVEN: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []


def _keep(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention that keeps its arguments."""
    GIVEN.append((query, key, value))
    return query.new_zeros(1, POSITIONS, 4, 128), None


def _attended(layer: Any, dtype: torch.dtype, form: str) -> torch.Tensor:
    """The layer's attention [T, heads, value] in float32, before its output projection, computed in a data type."""
    module, hidden, cos, sin = layer
    module.to(dtype)
    undo = (lambda: None) if form == "transformers" else keep_latents(module)
    with torch.inference_mode():
        module(hidden.to(dtype), (cos.to(dtype), sin.to(dtype)), None)
        undo()
        query, key, value = GIVEN[-1]
        if form == "transformers":
            scores = torch.nn.functional.scaled_dot_product_attention
            return scores(query, key, value, is_causal=True, scale=module.scaling)[0].transpose(0, 1).float()
        expansion, rows = Expansion.of(module), torch.cat([key, value], -1)[0, 0]
        if form == "prompt":
            assert not expansion.absorbs(POSITIONS, rows.shape[1])
            made = attend_to_rows(expansion, query, rows, lambda *qkv: attend(*qkv, module.scaling, None))
            return made[0].transpose(0, 1).float()
        sums = query.new_empty(POSITIONS, 4, rows.shape[1])
        if form == "program":
            return _attended_by_a_program(expansion, query, rows, module.scaling)
        if form == "compiled":
            _attend_causally(expansion.absorb(query[0]), rows, module.scaling, sums)
        else:
            absorbed = expansion.absorb(query[0])[None]
            sums = attend(absorbed, rows[None, None], rows[None, None], module.scaling, None)[0].transpose(0, 1)
        return expansion.values(sums.transpose(0, 1)).transpose(0, 1).float()


def _attend_causally(query_HTD: torch.Tensor, rows: torch.Tensor, scaling: float, sums: torch.Tensor) -> None:
    places = torch.cat([torch.arange(end) for end in range(1, POSITIONS + 1)])
    starts = [end * (end - 1) // 2 for end in range(1, POSITIONS + 2)]
    one = [OneQuery(i, starts[i], starts[i + 1]) for i in range(POSITIONS)]
    attend_one_query(query_HTD, (rows[:, None], rows[:, None]), places, one, scaling, sums)


def _attended_by_a_program(expansion: Expansion, query: torch.Tensor, rows: torch.Tensor, scaling: float) -> Any:
    """Attention with the functions of a recorded step."""
    (heads, nope, rank), numbers, width = expansion.key_HNR.shape, expansion.value_HVR.shape[1], rows.shape[1]
    absorbed, factor = torch.empty(POSITIONS, heads, width), torch.tensor([scaling])
    sums, room = rows.new_empty(POSITIONS, heads, width), torch.empty(heads, rank)
    output = rows.new_empty(POSITIONS, heads, numbers)
    query_THD = query[0].transpose(0, 1).contiguous()
    program, given = Program(), (0, heads, POSITIONS)
    job = [*given, query_THD.data_ptr(), 2 * heads * query.shape[-1], 2 * query.shape[-1], nope, width - rank]
    job += [expansion.key_HNR.data_ptr(), nope + numbers, rank, factor.data_ptr(), absorbed.data_ptr()]
    program.add(step_operations.absorb.address, job)
    job = [*given, sums.data_ptr(), width, expansion.value_HVR.data_ptr(), nope + numbers, rank, numbers]
    program.add(step_operations.expand_values.address, [*job, room.data_ptr(), output.data_ptr()], parallel=True)
    program.close()
    second = program.run(0, 1, 1)
    _attend_causally(absorbed.transpose(0, 1), rows, 1.0, sums)
    program.run(second, len(program), 2)
    return output.float()


def test_float32_is_within_rounding_of_transformers(layer: Any) -> None:
    expected = _attended(layer, torch.float32, "transformers")
    for form in ("prompt", "absorbed"):
        assert float((_attended(layer, torch.float32, form) - expected).abs().max()) < 1e-4


def test_bfloat16_errs_as_transformers_does(layer: Any) -> None:
    """The mean error against float32 over 1,000 positions is at most 1.1 times that of transformers' expanded form.

    That of a recorded step is at most 1.05 times that of the modules.
    """
    exact = _attended(layer, torch.float32, "transformers")
    error = {
        form: float((_attended(layer, torch.bfloat16, form) - exact).abs().mean())
        for form in ("transformers", "prompt", "absorbed", "compiled", "program")
    }
    assert error["program"] <= 1.05 * error["compiled"], error
    assert max(error.values()) <= 1.1 * error["transformers"], error


QWEN = {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
MIXTRAL = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
GLM = {"num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128}
LITE = {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("name", "sizes", "token_bytes"),
    [
        ("deepseek_v3", {}, 70_272),
        ("deepseek_v2", LITE, 31_104),
        ("deepseek_v32", {}, 85_888),
        ("qwen3_moe", QWEN, 98_304),
        ("mixtral", MIXTRAL, 131_072),
        ("glm4_moe", GLM, 188_416),
        ("gpt_oss", {}, 73_728),
    ],
)
def test_a_token_takes_the_bytes_of_the_guide(name: str, sizes: dict[str, int], token_bytes: int) -> None:
    config = CONFIG_MAPPING[name](**sizes)
    few, many = (kv_cache_bytes(config, torch.bfloat16, tokens) for tokens in (1024, 2048))
    assert many - few == 1024 * token_bytes
    assert f"| {token_bytes:,} |" in topics()["serving"]
