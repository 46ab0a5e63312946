"""Expected reads against draws of independent routes."""

import numpy as np
import pytest

from moetool.capture.automatic import cost_on
from moetool.capture.composition import Composition
from moetool.capture.estimate import capture_cost, most_reads
from moetool.measuring.fit_machine import FitOptions, fit_machine
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.serve_options import ServeOptions
from tests import synthetic_routes

SPEC = synthetic_routes.make_spec(num_experts=16)


def test_independent_routes_read_as_many_experts() -> None:
    rng = np.random.default_rng(0)
    sizes, prompt, new, slots = (4, 2), 3, 5, SPEC.total_experts // 4
    composition = Composition(sizes=sizes, kv_tokens=64, chunk_tokens=8)
    expected = most_reads(SPEC, composition, [(prompt, prompt + new)] * 6, slots)

    def needed(tokens: int) -> int:
        return sum(
            len({expert for _ in range(tokens) for expert in rng.permutation(count)[:k].tolist()})
            for count, k in zip(SPEC.num_experts_L, SPEC.top_k_L, strict=True)
        )

    drawn = []
    for _ in range(200):
        prompts = needed(8) + needed(4) + needed(6)  # 12 prompt tokens in chunks of 8; 6 in one
        drawn.append(prompts + sum(0.75 * needed(size) for size in sizes for _ in range(new - 1)))
    assert expected == pytest.approx(np.mean(drawn), rel=0.02)


def test_with_a_slot_for_every_expert_each_is_read_once() -> None:
    composition = Composition(sizes=(2,), kv_tokens=64, chunk_tokens=8)
    assert most_reads(SPEC, composition, [(3, 8)] * 2, SPEC.total_experts) == SPEC.total_experts
    assert most_reads(SPEC, composition, [(3, 8)] * 2, SPEC.total_experts, 3) == 3 * SPEC.total_experts


def test_host_memory_holds_what_the_slots_do_too() -> None:
    """An expert is read from disk if host memory lacks it: more slots save reads from host memory alone."""
    checkpoint = Checkpoint.open("qwen3-30b-a3b", weights=False)
    spec, rates = checkpoint.spec, fit_machine(FitOptions(machine="pc-rtx-4090-ddr5")).rates
    options = ServeOptions(device="cuda", dtype="bfloat16", host_memory_bytes=spec.all_experts_bytes // 2)
    composition, lengths = Composition(sizes=(4,), kv_tokens=4096, chunk_tokens=4), [(1, 1000)] * 4
    none, few, many = (
        capture_cost(checkpoint, options, composition, lengths, int(share * spec.total_experts), rates)
        for share in (0, 1 / 8, 3 / 8)
    )
    assert many.read_bytes < 0.8 * few.read_bytes
    for cost in (few, many):
        assert cost.disk_bytes == pytest.approx(none.read_bytes / 2, rel=0.01)


def test_a_capture_on_named_machines_reads_what_their_memory_lacks() -> None:
    checkpoint = Checkpoint.open("qwen3-30b-a3b", weights=False)
    laptop, desktop, node = (
        cost_on(checkpoint, fit_machine(FitOptions(machine=name)), [(256, 288)] * 1000)
        for name in ("laptop-16gb", "pc-rtx-4090-ddr5", "h100")
    )
    whole = checkpoint.spec.all_experts_bytes
    assert {cost.tokens for cost in (laptop, desktop, node)} == {287_000}
    assert node.disk_bytes == node.read_bytes == whole  # every expert has a slot
    groups = -(-1000 // laptop.together)
    assert 0.7 * 32 < laptop.read_bytes / (groups * whole) < 32  # one pass over prompts, and 31 steps
    assert laptop.disk_bytes == laptop.read_bytes  # no host tier
    assert whole <= desktop.disk_bytes < 0.3 * desktop.read_bytes
    assert laptop.read_s == pytest.approx(laptop.read_bytes / 3e9)
