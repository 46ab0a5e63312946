"""The same promises on a GPU: `pytest -m gpu tests/e2e/test_cuda.py`. Skipped where there is none."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool.caching._policy import build_policy
from moetool.caching._residency import Residency
from moetool.capture.run import CaptureOptions, RunSetup, capture
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, load_lazy, parse_device
from moetool.prompts import gather as prompt_sets
from moetool.runtime.assembly import ServeOptions, build_engine, open_pooled
from moetool.runtime.copies import ALIGNMENT, open_copies
from moetool.runtime.expert_forward import ExpertRuntime
from moetool.runtime.expert_store import ExpertStore, open_store
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from moetool.types import ForwardInfo, Phase
from tests import families
from tests.e2e.test_tiers import AllHosted, Hosting
from tests.engines import Chaos, engine, generate

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
    assert host.is_pinned()
    assert (host.data_ptr() % ALIGNMENT, device.data_ptr() % ALIGNMENT) == (0, 0)
    assert (host.numel(), device.numel()) == (1_000_000, 1_000_000)
    host.random_(0, 255)
    mark = copies.copy(host, device, after=copies.mark())
    copies.wait(mark, "host")
    assert torch.equal(device.cpu(), host)
    copies.close()
    assert not host.is_pinned()


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
    assert metrics["host_pool_bytes"] == (memory or 3 * SLOT)
    if experts == 256:
        assert metrics["expert_reads"] <= 256
        assert metrics["host_hits"] > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [Chaos, Hosting, AllHosted])
def test_no_order_of_loads_changes_a_bit(
    kind: Any, seed: int, baseline: Any, reference: Path, tokenizer: Any, cuda: torch.device
) -> None:
    """Exact but for experts computed on the CPU, which rounds in its own way."""
    made = engine(
        reference, tokenizer, kind(Checkpoint.open(reference).spec, 12, seed), 12, device=cuda, io_threads=1 + seed % 3
    )
    if kind is Chaos:
        _check(made, baseline)
        return
    ids, tokens, logits = baseline
    found_tokens, found_logits = generate(made, ids, 8)
    made.close()
    assert found_tokens == tokens
    for a, b in zip(found_logits, logits, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-3)


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
        options = CaptureOptions(max_new_tokens=4, batch_size=4, keep=keep, device=device)
        trace = Trace(capture("reference", texts, tmp_path / name, options, RunSetup(open_model=opener)).out)
        batches = trace.batches(columns=["weights", "logits", "hidden"])
        rows.append(TokenBatch.concatenate(list(batches)))
    for found in rows[1:]:
        assert (found.experts_TS == rows[0].experts_TS).mean() > 0.99
        assert found.logits_TF is not None and rows[0].logits_TF is not None
        near = np.isclose(found.logits_TF.astype(np.float32), rows[0].logits_TF.astype(np.float32), atol=2e-2)
        assert near.mean() > 0.99


def test_seeds_give_the_same_text_on_both_devices(reference: Path, tokenizer: Any) -> None:
    from moetool.request import SamplingParams
    from moetool.runtime.sampling import gumbel_scores

    params = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9)
    logits_V = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    scores = [gumbel_scores(logits_V.to(device), params, 7, 3).cpu() for device in ("cpu", "cuda")]
    assert torch.equal(*scores)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("policy", ["lru", "foresight", "static_split"])
def test_two_gpus_share_the_model(policy: str, baseline: Any, reference: Path, tokenizer: Any, cuda: Any) -> None:
    made = engine(reference, tokenizer, policy, 60, device=cuda, devices=2)
    assert [device.index for device in made.store.devices] == [0, 1]
    _check(made, baseline)


def test_a_pool_that_the_gpu_does_not_have_is_refused(lazy: Any, cuda: torch.device) -> None:
    from moetool.errors import CapacityError

    with pytest.raises(CapacityError, match="does not have"):
        ExpertStore(lazy.files, 100_000_000, copies=open_copies(cuda))


def test_the_server_is_put_together_on_the_gpu(reference: Path) -> None:
    options = ServeOptions(device="cuda", kv_tokens=512, host_memory_bytes=256 * SLOT)
    made = build_engine(Checkpoint.open("reference"), options=options, policy="lru", device_memory_bytes=14_000_000)
    assert made.runtime.store.copies.device.type == "cuda"
    assert next(made.batcher.model.parameters()).device.type == "cuda"
    made.close()
