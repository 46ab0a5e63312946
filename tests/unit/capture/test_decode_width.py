"""The number of requests that decode together."""

import numpy as np

from moetool.base.types import Phase
from moetool.capture.decode_width import PROBE_STEPS, DecodeWidth
from moetool.trace.rows import TokenBatch
from tests import synthetic_routes

SPEC = synthetic_routes.make_spec(num_experts=64)
K = SPEC.top_k_L[0]


def _rows(experts_of: dict[int, np.ndarray], phase: Phase, step: int) -> TokenBatch:
    size = len(experts_of)
    numbers = np.full(size, step, np.int32)
    return TokenBatch(
        request_T=np.array(list(experts_of), np.int32),
        forward_T=numbers,
        phase_T=np.full(size, phase, np.uint8),
        iteration_T=numbers,
        position_T=numbers,
        token_id_T=numbers,
        experts_TS=np.stack(list(experts_of.values())).astype(np.uint16),
        weights_TS=None,
        logits_TF=None,
    )


def _draw(rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([rng.permutation(64)[:K] for _ in range(SPEC.num_layers)])


def _decided(slots: int, repeating: bool) -> list[int]:
    rng = np.random.default_rng(0)
    width = DecodeWidth(SPEC, slots, range(32))
    own = {request: _draw(rng) for request in range(32)}
    width.observe(_rows(own, Phase.PREFILL, 0), 32)
    widths = [width.width]
    for step in range(1, 3 * PROBE_STEPS):
        decoding = list(range(width.width))
        width.observe(_rows({r: own[r] if repeating else _draw(rng) for r in decoding}, Phase.DECODE, step), 32)
        widths.append(width.width)
    return widths


def test_requests_that_use_the_same_experts_again_decode_few_together() -> None:
    slots = SPEC.num_layers * 4 * K  # for four requests
    widths = _decided(slots, repeating=True)
    assert widths[:PROBE_STEPS] == [1] * PROBE_STEPS
    assert widths[-1] == 4


def test_requests_whose_experts_change_decode_all_together() -> None:
    widths = _decided(SPEC.num_layers * 4 * K, repeating=False)
    assert widths[:PROBE_STEPS] == [1] * PROBE_STEPS
    assert widths[-1] == 32


def test_with_a_slot_for_every_expert_all_decode_together_at_once() -> None:
    width = DecodeWidth(SPEC, 0, range(32))
    assert width.fixed and width.width == 32


def test_equal_routes_give_equal_widths() -> None:
    assert _decided(40, repeating=True) == _decided(40, repeating=True)
