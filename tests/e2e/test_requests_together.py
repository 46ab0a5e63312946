"""Requests with caches of their own share each layer's experts, and a pool by layer keeps what one pool loses."""

import shutil
from pathlib import Path

import pytest

from moetool.caching.residency import Counts
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.loop.own_caches import OwnCaches
from moetool.runtime.request import SamplingParams
from moetool.runtime.serve_options import ServeOptions
from tests import families

PROMPTS = [[3 + (7 * i + 11 * j + j * j) % 60 for j in range(12)] for i in range(4)]
SLOTS = 12  # of 64 experts


@pytest.fixture(scope="module")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory, reference: Path) -> Checkpoint:
    folder = tmp_path_factory.mktemp("qwen3_next")
    layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    families.save("qwen3_next", folder, num_experts=16, **layers)
    for file in reference.glob("token*"):
        shutil.copy(file, folder)
    return Checkpoint.open(str(folder))


def _serve(checkpoint: Checkpoint, pool: str, *, together: bool) -> tuple[Counts, dict[int, list[int | None]]]:
    options = ServeOptions(kv_tokens=256, pool=pool, oracle_s=0.0, threads=1)
    memory = divide_with_slots(checkpoint, options, SLOTS).device_bytes
    engine = build_engine(checkpoint, options=options, policy="lru", device_memory_bytes=memory)
    assert isinstance(engine.batcher, OwnCaches) and engine.store.num_slots == SLOTS
    engine.state = "ready"
    tokens: dict[int, list[int | None]] = {}
    for prompt in PROMPTS:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        engine.submit(prompt, params, lambda o: tokens.setdefault(o.request, []).append(o.token))
        while not together and not engine.idle:
            engine.step()
    while not engine.idle:
        engine.step()
    counts = engine.residency.counts
    engine.close()
    return counts, tokens


def test_four_requests_load_fewer_experts_together_than_in_turn(qwen3_next: Checkpoint) -> None:
    turn, alone = _serve(qwen3_next, "layer", together=False)
    both, tokens = _serve(qwen3_next, "layer", together=True)
    assert tokens == alone and len(tokens) == len(PROMPTS)
    assert both.needed < 0.75 * turn.needed  # every forward needs the union at each layer, once
    assert both.loads < 0.85 * turn.loads


def test_a_step_that_needs_more_than_one_pool_evicts_all_of_it(qwen3_next: Checkpoint) -> None:
    one, tokens = _serve(qwen3_next, "one", together=True)
    layer, same = _serve(qwen3_next, "layer", together=True)
    assert tokens == same and layer.needed == one.needed
    assert one.hit_rate < layer.hit_rate / 2
