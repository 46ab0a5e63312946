"""The same promises on a GPU: `pytest -m gpu tests/e2e/test_cuda.py`. Skipped where there is none."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool.base import families as known
from moetool.base.families import own_cache
from moetool.base.types import ForwardInfo, Phase
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.capture.run import CaptureOptions, RunSetup, capture
from moetool.kernels import norms
from moetool.kernels.slot_backends import find_multiply, triton_kernels
from moetool.kernels.slot_products import SlotRows, multiply
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, load_lazy, parse_device
from moetool.prompts import gather as prompt_sets
from moetool.runtime.assembly import build_engine, open_pooled
from moetool.runtime.decoding import NOT_NUMBERS
from moetool.runtime.experts.copies import ALIGNMENT, open_copies
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import ExpertStore, open_store
from moetool.runtime.kv import paged_attention
from moetool.runtime.loop.batched_sampling import RowSampling, batched_gumbel_scores
from moetool.runtime.loop.sampling import Sampler
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.serve_options import ServeOptions
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests import families
from tests.contract.test_quantized import written
from tests.engines import AllOnHost, RandomPolicy, SomeOnHost, engine, generate
from tests.greedy import forward_logits
from tests.servers import eventually

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SLOT = 73_728
TOKENS = [[(7 * i + 3) % 60 + 3 for i in range(24)]]
MIXED = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 ="]


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    return parse_device("cuda")


@pytest.fixture(scope="module")
def baseline(reference: Path, tokenizer: Any, cuda: torch.device) -> Any:
    """Every expert has a slot on the GPU: tokens and logits of one batch."""
    ids = [tokenizer(text)["input_ids"] for text in MIXED]
    made = engine(reference, tokenizer, "lru", 256, device=cuda)
    result = generate(made, ids, 8)
    made.close()
    return ids, *result


def _check(made: Any, baseline: Any) -> Any:
    ids, tokens, logits = baseline
    found_tokens, found_logits = generate(made, ids, 8)
    metrics = made.metrics()
    made.close()
    assert found_tokens == tokens
    assert all(torch.equal(a, b) for a, b in zip(found_logits, logits, strict=True))
    return metrics


def test_memory_is_pinned_aligned_and_given_back(cuda: torch.device) -> None:
    copies = open_copies(cuda)
    host, device = copies.host_memory(1_000_000), copies.device_memory(1_000_000)
    assert (host.data_ptr() % ALIGNMENT, device.data_ptr() % ALIGNMENT) == (0, 0)
    assert (host.numel(), device.numel()) == (1_000_000, 1_000_000)
    host.random_(0, 255)
    mark = copies.copy(host, device, after=copies.mark())
    copies.wait(mark, "host")
    assert torch.equal(device.cpu(), host)
    assert int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr())) == 0  # `is_pinned` does not always see it
    copies.close()
    with contextlib.suppress(RuntimeError):  # the driver's answer to being asked a second time
        torch.zeros(1, device=cuda)


def test_a_copy_waits_for_the_computing_that_came_before_it(cuda: torch.device) -> None:
    copies = open_copies(cuda)
    host, slot = copies.host_memory(1 << 20), copies.device_memory(1 << 20)
    slot.fill_(1)
    torch.cuda._sleep(200_000_000)  # the GPU is busy while the host goes on
    seen = slot.clone()
    host.fill_(2)
    mark = copies.copy(host, slot, after=copies.mark())
    assert not copies.passed(mark)
    copies.wait(mark, "host")
    after = slot.clone()
    assert (int(seen.min()), int(after.max())) == (1, 2)
    assert copies.stalled("host") >= 0
    copies.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss", "olmoe", "glm4_moe"])
def test_lazy_logits_are_those_of_the_whole_model(family: str, tmp_path: Path, cuda: torch.device) -> None:
    families.save(family, tmp_path)
    tokens = torch.tensor(TOKENS, device=cuda)
    full = load_full(Checkpoint.open(tmp_path), torch.float32, cuda)
    full.model.set_experts_implementation("eager")
    with torch.inference_mode():
        expected = full.model(tokens, use_cache=False).logits[0]
    loaded = load_lazy(Checkpoint.open(tmp_path), torch.float32, cuda)
    residency = Residency(build_policy("lru", loaded.spec, {}, 3))
    runtime = ExpertRuntime(loaded, residency, open_store(loaded, residency))
    count = len(TOKENS[0])
    runtime.begin_forward(
        ForwardInfo(
            forward_id=0, request_T=(0,) * count, phase_T=(Phase.PREFILL,) * count, position_T=tuple(range(count))
        )
    )
    with torch.inference_mode():
        found = loaded.model(tokens, use_cache=False).logits[0]
    runtime.end_forward()
    runtime.close()
    assert found.device.type == "cuda"
    for name, buffer in loaded.model.named_buffers():
        assert torch.equal(buffer, full.model.get_buffer(name)), name
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("policy", "slots"), [("on_demand", 4), ("lru", 2), ("lru", 64), ("lfu", 24), ("duoserve", 5), ("layerwise", 80)]
)
@pytest.mark.parametrize("experts", [None, 40, 256])
def test_every_policy_gives_the_same_bits(
    policy: str, slots: int, experts: int | None, baseline: Any, reference: Path, tokenizer: Any, predictor: Any
) -> None:
    memory = None if experts is None else experts * SLOT
    device = torch.device("cuda", 0)
    made = engine(reference, tokenizer, policy, slots, predictor=predictor, host_memory_bytes=memory, device=device)
    metrics = _check(made, baseline)
    assert metrics["slots_bytes"] <= slots * SLOT
    assert metrics["host_pool_bytes"] == (memory or 256 * SLOT)  # a ring of up to 1 GiB
    if experts == 256:
        assert metrics["expert_reads"] <= 256
        assert metrics["host_hits"] > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [RandomPolicy, SomeOnHost, AllOnHost])
def test_no_order_of_loads_changes_a_bit(
    kind: Any, seed: int, baseline: Any, reference: Path, tokenizer: Any, cuda: torch.device
) -> None:
    """Exact but for experts computed on the CPU, which rounds in its own way."""
    made = engine(
        reference, tokenizer, kind(Checkpoint.open(reference).spec, 12, seed), 12, device=cuda, io_threads=1 + seed % 3
    )
    if kind is RandomPolicy:
        _check(made, baseline)
        return
    ids, tokens, logits = baseline
    found_tokens, found_logits = generate(made, ids, 8)
    made.close()
    assert found_tokens == tokens
    for a, b in zip(found_logits, logits, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("policy", "slots", "forced"),
    [("lru", 40, False), ("lru", 256, False), ("lru", 256, True), ("foresight", 64, False), ("finemoe", 64, False)],
)
def test_graphs_give_the_bits_of_single_launches(
    policy: str, slots: int, forced: bool, reference: Path, tokenizer: Any, cuda: torch.device
) -> None:
    """Log-probabilities of all tokens, with requests that end one by one; `forced`: one that watches its experts."""
    ids = [tokenizer(text)["input_ids"] for text in [*MIXED, "word " * 130]]
    ids[4] = ids[4][:250]  # needs room for more keys while it decodes
    found = []
    for by_graphs in (False, True):
        made = engine(reference, tokenizer, policy, slots, device=cuda, host_memory_bytes=256 * SLOT)
        if not by_graphs:
            made.batcher.graphs = None
        outputs: list[list[Any]] = [[] for _ in ids]
        for i, prompt in enumerate(ids):
            params = SamplingParams(max_tokens=8 + 4 * i, ignore_eos=True, logprobs=3, return_routes=forced and i == 1)
            made.submit(prompt, params, outputs[i].append)
        while not made.idle:
            made.step()
        if by_graphs:
            assert made.batcher.graphs.num_recorded >= 3
        found.append([[(o.token, o.logprob, o.error, o.finish) for o in its] for its in outputs])
        counts = made.residency.counts
        made.close()
        found.append([counts.needed, counts.kept])
    assert found[2:] == found[:2]


@pytest.mark.parametrize("slots", [3, None])
@pytest.mark.parametrize("family", sorted(name for name, family in known.FAMILIES.items() if not family.refused))
def test_steps_of_a_family_are_recorded(family: str, slots: int | None, tmp_path: Path, cuda: torch.device) -> None:
    families.save(family, tmp_path)
    if own_cache(Checkpoint.open(tmp_path).config):
        pytest.skip("no paged cache")
    # phimoe's positions come from the CPU
    assert (_recorded(tmp_path, slots, cuda) == 0) == (family == "phimoe")


@pytest.mark.parametrize("slots", [3, None])
@pytest.mark.parametrize("name", ["qwen3_moe-int4", "deepseek_v3-fp8_block", "qwen3_moe-fp8_channel", "mixtral-gptq"])
def test_steps_of_packed_experts_are_recorded(name: str, slots: int | None, tmp_path: Path, cuda: torch.device) -> None:
    assert _recorded(written(name, tmp_path)[0], slots, cuda) > 0


def _recorded(model: Path, slots: int | None, cuda: torch.device) -> int:
    """Shapes of steps that graphs were made for, once they have given the tokens of single launches."""
    found, num_recorded = [], 0
    for by_graphs in (False, True):
        made = engine(model, None, "lru", slots or Checkpoint.open(model).spec.total_experts, device=cuda)
        graphs = made.batcher.graphs
        if not by_graphs:
            made.batcher.graphs = None
        outputs: list[Any] = []
        params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3)
        made.submit(TOKENS[0], params, outputs.append)
        while not made.idle:
            made.step()
        num_recorded = graphs.num_recorded
        made.close()
        found.append([(o.token, o.logprob, o.error) for o in outputs])
    assert found[1] == found[0]
    return num_recorded


def test_tokens_are_those_of_the_cpu(baseline: Any, reference: Path, tokenizer: Any) -> None:
    ids, tokens, _ = baseline
    made = engine(reference, tokenizer, "lru", 256)
    assert generate(made, ids, 8)[0] == tokens
    made.close()


def test_capture_writes_the_rows_of_the_cpu(reference: Path, tmp_path: Path) -> None:
    texts = prompt_sets.load(["all"], max_prompts=2)
    keep = ("topk", "logits", "embeddings", "hidden")
    memory = Checkpoint.open(reference).dense_bytes(torch.float32) + 20 * SLOT
    pooled = partial(open_pooled, device_memory_bytes=memory, host_memory_bytes=200 * SLOT)
    rows = []
    for name, device, opener in (("cpu", "cpu", load_full), ("cuda", "cuda", load_full), ("pooled", "cuda", pooled)):
        options = CaptureOptions(max_new_tokens=4, batch_size=4, keep=keep, device=device, dtype="float32")
        trace = Trace(capture("reference", texts, tmp_path / name, options, RunSetup(open_model=opener)).out)
        batches = trace.batches(columns=["weights", "logits", "hidden"])
        rows.append(TokenBatch.concatenate(list(batches)))
    for found in rows[1:]:
        assert (found.experts_TS == rows[0].experts_TS).mean() > 0.99
        assert found.logits_TF is not None and rows[0].logits_TF is not None
        near = np.isclose(found.logits_TF.astype(np.float32), rows[0].logits_TF.astype(np.float32), atol=2e-2)
        assert near.mean() > 0.99


def test_a_batch_is_sampled_as_it_would_be_on_a_processor(cuda: torch.device) -> None:
    limits = [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (40, 0.8, 0.01)]
    params = [SamplingParams(max_tokens=1, temperature=0.8, top_k=k, top_p=p, min_p=m) for k, p, m in limits]
    logits_BV = torch.randn(len(params), 40_000, generator=torch.Generator().manual_seed(0))
    scores = []
    for device in (torch.device("cpu"), cuda):
        draws = RowSampling.of([(each, 7 + i) for i, each in enumerate(params)], 40_000, device)
        scores.append(batched_gumbel_scores(logits_BV.to(device), draws).cpu())
    assert torch.equal(scores[0].isfinite(), scores[1].isfinite())
    assert torch.equal(scores[0].argmax(-1), scores[1].argmax(-1))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)


def test_scores_that_are_no_numbers_end_their_request_only(cuda: torch.device) -> None:
    sampler = Sampler()
    for request in (1, 2):
        sampler.add(request, SamplingParams(max_tokens=1, temperature=0.7, top_p=0.9, seed=1), [0])
    scores = torch.randn(2, 1000, device=cuda)
    scores[0, 5] = float("nan")
    chosen = sampler.apply([1, 2], scores).argmax(-1).tolist()
    assert sampler.broken_end(1) == Output(1, None, finish="error", error=NOT_NUMBERS)
    assert sampler.broken_end(2) is None
    assert 0 <= chosen[1] < 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 2048), (3, 32, 128), (500, 100), (0, 64)])
def test_norms_are_those_of_transformers(shape: tuple[int, ...], dtype: torch.dtype, cuda: torch.device) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    draw = torch.Generator().manual_seed(1)
    norm = Qwen3MoeRMSNorm(shape[-1], eps=1e-6).to(cuda, dtype)
    norm.weight.data.copy_(torch.randn(shape[-1], generator=draw))
    x = torch.randn(shape, generator=draw).mul_(3).to(cuda, dtype)
    expected = norm(x)
    assert norms.adopt(torch.nn.Sequential(norm)) == 1
    found = norm(x)
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0)
    assert all(torch.equal(norm(row), one) for row, one in zip(x, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("queries", "keys", "window"), [(33, 33, None), (17, 60, None), (1, 45, None), (40, 70, 24)])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_attention_of_a_chunk_is_that_of_the_cpu(
    queries: int, keys: int, window: int | None, kv_heads: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    draw = torch.Generator().manual_seed(queries)
    made = [
        torch.randn(1, heads, length, 64, generator=draw).to(dtype)
        for heads, length in ((8, queries), (kv_heads, keys), (kv_heads, keys))
    ]
    expected = paged_attention.attend(*(each.float() for each in made), 0.2, window)
    found = paged_attention.attend(*(each.to(cuda) for each in made), 0.2, window)
    near = 2**-6 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.cpu().float(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("slots", [24, 256])
def test_a_partial_forward_changes_no_bit(slots: int, reference: Path, tokenizer: Any, cuda: torch.device) -> None:
    ids, made = [tokenizer(text)["input_ids"] for text in MIXED], []
    for look in ("ahead", "resident"):
        served = engine(reference, tokenizer, "smoe", slots, device=cuda, options={"alpha": 0.0, "predict_from": look})
        made.append(generate(served, ids, 8))
        served.close()
    assert made[0][0] == made[1][0]
    assert all(torch.equal(one, other) for one, other in zip(made[0][1], made[1][1], strict=True))


EXPERTS, OUTPUTS, INPUTS = 60, 1408, 2048


def _event(tokens: int, dtype: torch.dtype, device: torch.device, slots: int = 90) -> Any:
    draw = torch.Generator().manual_seed(tokens)
    index_TK = torch.stack([torch.randperm(EXPERTS, generator=draw)[:6] for _ in range(tokens)]).to(device)
    x_TI = torch.randn(tokens, INPUTS, generator=draw).to(device, dtype)
    flat = torch.empty(slots * (OUTPUTS * INPUTS + 128), dtype=dtype, device=device).normal_(std=0.02)
    weight_SOI = flat.as_strided((slots, OUTPUTS, INPUTS), (OUTPUTS * INPUTS + 128, INPUTS, 1))
    return index_TK, x_TI, weight_SOI, torch.randperm(slots, generator=draw)[:EXPERTS].to(device, torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 8, 40, 400, 4000])
def test_kernels_give_the_products_of_each_expert(tokens: int, dtype: torch.dtype, cuda: torch.device) -> None:
    index_TK, x_TI, weight_SOI, table_E = _event(tokens, dtype, cuda)
    rows, out = SlotRows.of(index_TK, EXPERTS), torch.empty(tokens * 6, OUTPUTS, dtype=dtype, device=cuda)
    kernels = triton_kernels()
    assert find_multiply("cuda") is kernels.multiply
    kernels.multiply(x_TI, 6, rows, table_E, weight_SOI, out)
    for expert in (0, 7, EXPERTS - 1):
        places = (index_TK.reshape(-1) == expert).nonzero()[:, 0]
        expected = x_TI[places // 6].double() @ weight_SOI[int(table_E[expert])].double().T
        near = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-4}[dtype]
        torch.testing.assert_close(out[places].double(), expected, rtol=near, atol=near)
    again = torch.empty_like(out)
    for wave in range(4):
        table = torch.where(torch.arange(EXPERTS, device=cuda) % 4 == wave, table_E, -1)
        kernels.multiply(x_TI, 6, rows, table, weight_SOI, again)
    assert torch.equal(again, out)


@pytest.mark.parametrize("tokens", [1, 400])
def test_torch_has_the_same_products_where_triton_is_missing(tokens: int, cuda: torch.device) -> None:
    index_TK, x_TI, weight_SOI, table_E = _event(tokens, torch.bfloat16, cuda)
    rows = SlotRows.of(index_TK, EXPERTS)
    made = [torch.empty(tokens * 6, OUTPUTS, dtype=torch.bfloat16, device=cuda) for _ in range(2)]
    for multiply_slots, out in zip((multiply, triton_kernels().multiply), made, strict=True):
        multiply_slots(x_TI, 6, rows, table_E, weight_SOI, out)
    torch.testing.assert_close(*made, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("tokens", [4, 200])
def test_products_and_sampling_wait_for_nothing(tokens: int, cuda: torch.device) -> None:
    index_TK, x_TI, weight_SOI, table_E = _event(tokens, torch.bfloat16, cuda)
    out, scores = torch.empty(tokens * 6, OUTPUTS, dtype=torch.bfloat16, device=cuda), torch.randn(2, 5000, device=cuda)
    sampler = Sampler()
    sampler.add(1, SamplingParams(max_tokens=1, temperature=0.7, top_p=0.9, frequency_penalty=0.1, seed=1), [0])
    sampler.add(2, SamplingParams(max_tokens=1, logit_bias=((3, 1.0),)), [0])
    sampler.take(1, 3)

    def run() -> torch.Tensor:
        find_multiply("cuda")(x_TI, 6, SlotRows.of(index_TK, EXPERTS), table_E, weight_SOI, out)
        return sampler.apply([1, 2], scores.clone()).argmax(-1)

    run()  # compiles
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chosen = run()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert ((chosen >= 0) & (chosen < 5000)).all()


def test_one_product_over_the_pool_gives_the_tokens_of_one_by_one(
    baseline: Any, reference: Path, tokenizer: Any, cuda: torch.device
) -> None:
    ids, tokens, logits = baseline
    made = engine(reference, tokenizer, "lru", 256, device=cuda, pooled=False)
    found_tokens, found_logits = generate(made, ids, 8)
    made.close()
    assert found_tokens == tokens
    assert all(torch.allclose(a, b, rtol=0, atol=1e-3) for a, b in zip(found_logits, logits, strict=True))


@pytest.mark.parametrize("name", ["qwen3_moe-int4", "qwen3_moe-fp8_block", "gpt_oss-mxfp4", "mixtral-gptq"])
def test_packed_experts_give_the_logits_of_the_cpu(name: str, tmp_path: Path, cuda: torch.device) -> None:
    path, _ = written(name, tmp_path)
    tokens = torch.tensor(TOKENS)
    expected = forward_logits(path, tokens)
    found = [forward_logits(path, tokens, slots, pooled=True, device=cuda).cpu() for slots in (3, 16)]
    assert torch.equal(*found)
    assert torch.allclose(found[0], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_host_memory_is_read_ahead(reference: Path) -> None:
    options = ServeOptions(device="cuda", kv_tokens=512, host_memory_bytes=256 * SLOT)
    made = build_engine(Checkpoint.open("reference"), options=options, policy="lru", device_memory_bytes=14_000_000)
    eventually(lambda: made.metrics()["expert_reads"] == 256)
    made.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("policy", ["lru", "foresight", "static_split"])
def test_two_gpus_share_the_model(policy: str, baseline: Any, reference: Path, tokenizer: Any, cuda: Any) -> None:
    made = engine(reference, tokenizer, policy, 60, device=cuda, devices=2)
    assert [device.index for device in made.store.devices] == [0, 1]
    _check(made, baseline)


def test_a_pool_that_the_gpu_does_not_have_is_refused(lazy: Any, cuda: torch.device) -> None:
    from moetool.base.errors import CapacityError

    for _ in range(3):  # each gives back the host memory that it had registered
        with pytest.raises(CapacityError, match="does not have"):
            ExpertStore(lazy.files, 100_000_000, copies=open_copies(cuda))


def test_the_server_is_put_together_on_the_gpu(reference: Path) -> None:
    options = ServeOptions(device="cuda", kv_tokens=512, host_memory_bytes=256 * SLOT)
    made = build_engine(Checkpoint.open("reference"), options=options, policy="lru", device_memory_bytes=14_000_000)
    assert made.runtime.store.copies.device.type == "cuda"
    assert next(made.batcher.model.parameters()).device.type == "cuda"
    made.close()
