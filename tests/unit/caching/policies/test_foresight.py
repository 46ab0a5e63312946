"""Foresight: what it expects from similar tokens, and that what it remembers comes back."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching.policies.foresight import Policy
from moetool.caching.policy import build_policy
from moetool.caching.residency import Counts, Residency
from moetool.prediction import token_kernels, token_memory
from moetool.prediction.token_memory import TokenMemory, WindowBatch, compile_loops
from moetool.training.predictor import Predictor, build
from moetool.training.tokens import Tokens
from tests.refusals import refused
from tests.synthetic import MadeUpPredictor, make_forward, make_spec, run_forwards

SPEC = make_spec(layers=4, experts=16, top_k=2)
SLOTS = 16
NEVER = np.float32(0)


def walk(num_tokens: int, seed: int = 0) -> np.ndarray:
    """Routes [T, L, K] that go round: a token's experts say those of the next tokens, with some noise."""
    rng = np.random.default_rng(seed)
    start_T = (np.arange(num_tokens) * 2) % SPEC.num_experts
    first_TL = (start_T[:, None] + 5 * np.arange(SPEC.num_layers)) % SPEC.num_experts
    strays = rng.random(first_TL.shape) < 0.1
    first_TL = np.where(strays, rng.integers(0, SPEC.num_experts, first_TL.shape), first_TL)
    return np.stack([first_TL, (first_TL + 1) % SPEC.num_experts], axis=2)


def forwards(routes_TLK: np.ndarray, request: int = 0) -> Iterator[tuple[ForwardInfo, list[GateEvent]]]:
    for number, experts_LK in enumerate(routes_TLK):
        yield make_forward(SPEC, experts_LK[None], forward_id=number, request=request)


def drive(residency: Residency, routes_TLK: np.ndarray, request: int = 0) -> Counts:
    run_forwards(residency, forwards(routes_TLK, request))
    return residency.counts


def made(name: str = "foresight", slots: int = SLOTS, **options: object) -> Residency:
    return Residency(build_policy(name, SPEC, options, slots))


def alone_in(batch: WindowBatch, number: int) -> WindowBatch:
    """One request of a batch."""
    return replace(batch, windows=[batch.windows[number]], row_R3=batch.row_R3[number : number + 1])


def test_it_learns_a_cycle_that_lru_never_hits_in() -> None:
    """Eight tokens go round through more experts than there are slots: the case that recency is worst at."""
    lru, foresight = made("lru"), made(prefetch=False)
    drive(lru, walk(400))
    drive(foresight, walk(400))
    late = walk(200, seed=1)
    before = lru.counts, foresight.counts
    rates = [
        (after.kept - counts.kept) / (after.needed - counts.needed)
        for counts, after in zip(before, (drive(lru, late), drive(foresight, late)), strict=True)
    ]
    assert rates[1] > rates[0] + 0.1


def test_prefetches_are_mostly_used_once_it_has_learned() -> None:
    residency = made()
    drive(residency, walk(400))
    before = residency.counts
    counts = drive(residency, walk(200, seed=1))
    loads, wasted = counts.prefetch_loads - before.prefetch_loads, counts.wasted - before.wasted
    assert loads > 100
    assert wasted < 0.3 * loads


def test_a_price_on_waste_and_a_switch_end_prefetching() -> None:
    assert drive(made(prefetch=False), walk(100)).prefetch_loads == 0
    few, many = (drive(made(waste=waste), walk(150)).prefetch_loads for waste in (1e6, 0.2))
    assert few == 0 < many


def test_what_is_remembered_comes_back_and_decides_the_same() -> None:
    first = made()
    drive(first, walk(200))
    state = {name: array.copy() for name, array in first.policy.state().items()}
    later = []
    for _ in range(2):
        residency = made()
        residency.policy.restore(state)
        steps: list = []
        residency.sink = lambda *step, steps=steps: steps.append(step)
        drive(residency, walk(60, seed=2))
        later.append((steps, residency.counts.hit_rate))
    assert later[0] == later[1]
    assert later[0][1] > drive(made(), walk(60, seed=2)).hit_rate + 0.1, "what is remembered is of no use"


def test_a_smaller_memory_takes_the_last_tokens_of_a_state() -> None:
    large, small = made(memory=50), made(memory=20)
    drive(large, walk(70))
    state = large.policy.state()
    small.policy.restore(state)
    np.testing.assert_array_equal(small.policy.state()["path_RP"], state["path_RP"][-20:])
    assert small.policy.state()["before_R"].tolist() == [-1, *range(19)]


def test_a_state_of_another_model_is_refused() -> None:
    policy = made().policy
    other = build_policy("foresight", make_spec(layers=4, experts=16, top_k=3), {}, SLOTS)
    drive(made(), walk(3))
    with refused(ValueError, "path_RP", 8):
        policy.restore(other.state())
    with refused(ValueError, "passed_L"):
        policy.restore({name: array for name, array in policy.state().items() if name != "passed_L"})
    for name, value in (("path_RP", 64), ("before_R", 1), ("past_use_A", 2), ("passed_L", -1)):
        full = made()
        drive(full, walk(1))
        state = full.policy.state()
        state[name][...] = value
        with refused(ValueError, "range"):
            policy.restore(state)
    full = made()
    drive(full, walk(3))
    state = full.policy.state()
    with refused(ValueError, "experts", "layer"):
        policy.restore(state | {"path_RP": np.zeros_like(state["path_RP"])})
    for path_RP in (state["path_RP"].astype(np.float64), state["path_RP"][0], np.int32(0) + np.zeros((), np.int32)):
        with refused(ValueError, 8):
            policy.restore(state | {"path_RP": path_RP})


def test_a_forward_that_breaks_off_leaves_a_window_that_adds_up() -> None:
    memory = TokenMemory(SPEC, 40, 8)
    window = memory.open_window()
    for number, route_LK in enumerate(walk(60)):
        broken = number % 11 == 10
        batch = memory.begin([window], [[0]])
        for layer in range(2 if broken else SPEC.num_layers):
            memory.observe(batch, layer, [route_LK[layer].tolist()])
        if broken:
            memory.clear(window)
            continue
        stored = min(number - number // 11, 40)
        now_N, shared_LN = memory.now_WN[window.index], memory.shared_WLN[window.index]
        assert (now_N == shared_LN.sum(0, dtype=np.int32))[:stored].all()
        memory.store(window, batch.path_TP[0])


def test_requests_share_forwards_and_forwards_may_break_off() -> None:
    residency = made()
    routes_TLK = walk(90)
    for number in range(40):
        rows = routes_TLK[[number, number + 20, number + 50]]
        info = ForwardInfo(
            forward_id=number,
            request_T=(0, 1, 1) if number % 2 else (2, 0, 1),
            phase_T=(Phase.DECODE,) * 3,
            position_T=(number,) * 3,
        )
        residency.begin_forward(info)
        for layer in range(2 if number % 7 == 6 else SPEC.num_layers):
            experts_TK = tuple(map(tuple, rows[:, layer].tolist()))
            residency.event(GateEvent(forward=info, layer=layer, experts_TK=experts_TK))
        residency.end_forward(info)
    for request in (0, 1, 2):
        residency.end_request(request)
    assert drive(residency, routes_TLK, request=3).needed > 0


@pytest.mark.parametrize("size", [9, 100])
def test_values_are_those_of_the_formula(size: int) -> None:
    """Against a plain computation from all tokens, also where the memory is full and places are used again."""
    neighbours, memory = 3, TokenMemory(SPEC, size, 3)
    window, value_A = memory.open_window(), np.zeros(64, np.float32)
    key_TLK = walk(40) + np.arange(SPEC.num_layers)[:, None] * SPEC.num_experts
    sets = [[set(keys) for keys in token] for token in key_TLK.tolist()]
    use_A = np.zeros(64)
    for t, key_LK in enumerate(key_TLK.astype(np.int32)):
        batch = memory.begin([window], [[0]])
        for layer, keys in enumerate(key_LK):
            span = slice(16 * layer, 16 * layer + 16)
            use_A[span] *= token_memory.RECALL
            use_A[keys] += 1 - token_memory.RECALL
            memory.observe(batch, layer, [(keys - span.start).tolist()])
            first = max(0, t - size)
            shared = {
                i: sum(len(sets[t][x] & sets[i][x]) for x in range(layer + 1))
                + sum(len(sets[t - 1][x] & sets[i - 1][x]) for x in range(layer + 1, 4) if i > first)
                for i in range(first, t)
            }
            best = sorted(shared, key=lambda i: (-shared[i], -memory_place(i, size)))[:neighbours]
            weights = [np.exp(-token_memory.SHARPNESS * (shared[best[0]] - shared[i]) / 8) for i in best]
            expected_E = token_memory.PRIOR * use_A[span] / (1 - token_memory.RECALL ** (t + 1))
            for i, weight in zip(best, weights, strict=True):
                for expert in range(16):
                    passed = (n - i - 1 for n in range(i + 1, t + 1) if 16 * layer + expert in sets[n][layer])
                    distance = next(passed, token_memory.HORIZON)
                    if distance < token_memory.HORIZON:
                        expected_E[expert] += weight * round(255 * token_memory.DISCOUNT**distance) / 255
            memory.value(batch, span.start, span.stop, value_A)
            kept = [weight for weight in weights if weight >= 1e-3]
            np.testing.assert_allclose(value_A[span], expected_E / (sum(kept) + token_memory.PRIOR), atol=2e-3)
        memory.store(window, key_LK.ravel())


def memory_place(token: int, size: int) -> int:
    return token % size


def test_a_predictor_of_its_kind_is_taken_and_others_are_left() -> None:
    predictor = counted(200)
    taken = build_policy("foresight", SPEC, {}, SLOTS, predictor=predictor)
    assert isinstance(taken, Policy)
    assert Policy.uses() and Policy.uses(predictor) and not Policy.uses(MadeUpPredictor(SPEC))
    with_it, without = Residency(taken), made()
    for residency in (with_it, without):
        drive(residency, walk(60, seed=2))
    assert with_it.counts.kept + with_it.counts.prefetched > without.counts.kept + without.counts.prefetched + 10


def counted(num_tokens: int, **options: int) -> Predictor:
    predictor = build("next_use", SPEC, options).eval()
    requests = torch.arange(num_tokens) // 20
    predictor.count(Tokens(experts_TPK=torch.from_numpy(walk(num_tokens)), request_T=requests))
    return predictor


def test_the_predictor_keeps_whole_requests_and_predicts_by_them() -> None:
    predictor = counted(200, tokens=100)
    path_FP, before_F = predictor.routes()
    assert path_FP.shape == (100, 8) and path_FP.max() < 64
    assert before_F[:21].tolist() == [-1, *range(19), -1]
    late = Tokens(experts_TPK=torch.from_numpy(walk(60, seed=3)))
    top_TK = predictor.layer_scores(late.before(2), 2).topk(2).indices
    hits = (top_TK[:, :, None] == late.experts_TPK[:, 2, None]).any(2).float().mean()
    assert hits > 0.7
    assert len(predictor.routes()[0]) == 100 and not len(build("next_use", SPEC).routes()[0])


@pytest.mark.parametrize("option", [{"refresh": 0}, {"memory": 0}, {"neighbours": 0}, {"waste": -1}])
def test_bad_options_are_refused(option: dict[str, float]) -> None:
    with refused(UsageError, "foresight"):
        build_policy("foresight", SPEC, option, SLOTS)


def test_the_order_in_which_requests_end_decides_nothing() -> None:
    kept = []
    for ends in ([0, 1], [1, 0]):
        residency = Residency(build_policy("foresight", SPEC, {}, SLOTS))
        routes_TLK = walk(40)
        for token in range(0, 38, 2):
            forward, events = make_forward(SPEC, routes_TLK[token : token + 2], forward_id=token)
            info = replace(forward, request_T=(0, 1))
            residency.begin_forward(info)
            for event in events:
                residency.event(replace(event, forward=info))
            residency.end_forward(info)
        for request in ends:
            residency.end_request(request)
        for token in range(40):
            run_forwards(residency, [make_forward(SPEC, routes_TLK[token][None], forward_id=40 + token, request=2)])
        kept.append(residency.counts)
    assert kept[0] == kept[1]


def test_requests_of_a_batch_are_followed_as_if_each_were_alone() -> None:
    """Windows, similar tokens and values of four requests side by side, and the highest value of each expert."""
    routes_BTLK = np.stack([walk(30, seed=seed) for seed in range(4)])
    together = TokenMemory(SPEC, 200, 8)
    alone = together.open_window()
    for token_LK in walk(60, seed=9):  # a past that all share
        batch = together.begin([alone], [[0]])
        for layer in range(SPEC.num_layers):
            together.observe(batch, layer, [token_LK[layer].tolist()])
        together.store(alone, batch.path_TP[0])
    windows = [together.open_window() for _ in range(4)]
    all_A, one_A = np.zeros(64, np.float32), np.zeros(64, np.float32)
    for token in range(5):
        batch = together.begin(windows, [[0], [1], [2], [3]])
        for layer in range(SPEC.num_layers):
            together.observe(batch, layer, routes_BTLK[:, token, layer].tolist())
            together.value(batch, 0, 64, all_A)
            expected_A = np.zeros(64, np.float32)
            for number, window in enumerate(windows):
                together.value(alone_in(batch, number), 0, 64, one_A)
                expected_A = np.maximum(expected_A, one_A)
                shared_N = together.now_WN[window.index][: 60 + 4 * token]
                mine = {SPEC.expert_key(x, e) for x in range(layer + 1) for e in routes_BTLK[number, token, x].tolist()}
                past_LK = routes_BTLK[number, token - 1]
                before = {SPEC.expert_key(x, e) for x in range(layer + 1, 4) for e in past_LK[x].tolist()}
                if not token:
                    assert shared_N.tolist() == [
                        len(mine & set(path_P.tolist())) for path_P in together.state()["path_RP"]
                    ]
                else:
                    state = together.state()
                    previous = [state["path_RP"][row] if row >= 0 else [] for row in state["before_R"].tolist()]
                    assert shared_N.tolist() == [
                        len(mine & set(now.tolist())) + len(before & set(map(int, last)))
                        for now, last in zip(state["path_RP"], previous, strict=True)
                    ]
            np.testing.assert_array_equal(all_A, expected_A)
        for number, window in enumerate(windows):
            together.store(window, batch.path_TP[number])


def test_values_of_a_batch_are_asked_in_turns() -> None:
    """Each valuation asks a few requests anew; after enough of them, the values are those of all."""
    memory = TokenMemory(SPEC, 200, 8)
    windows = [memory.open_window() for _ in range(5)]
    for token_LK in walk(20):
        batch = memory.begin(windows, [[row] for row in range(5)])
        for layer in range(SPEC.num_layers):
            memory.observe(batch, layer, [((token_LK[layer] + row) % 16).tolist() for row in range(5)])
        for row, window in enumerate(windows):
            memory.store(window, batch.path_TP[row])
    all_A, turns_A = np.zeros(64, np.float32), np.zeros(64, np.float32)
    memory.value(batch, 0, 64, all_A)
    for _ in range(3):
        memory.value_all(batch, turns_A)
    np.testing.assert_array_equal(turns_A, all_A)


def test_values_survive_requests_that_need_more_room() -> None:
    """Room for their values grows between two valuations; those asked before keep what they had."""
    memory = TokenMemory(SPEC, 200, 8)
    windows = [memory.open_window() for _ in range(2)]
    value_A, later_A = np.zeros(64, np.float32), np.zeros(64, np.float32)
    for token_LK in walk(20):
        batch = memory.begin(windows, [[0], [1]])
        for layer in range(SPEC.num_layers):
            memory.observe(batch, layer, [((token_LK[layer] + row) % 16).tolist() for row in range(2)])
        for row, window in enumerate(windows):
            memory.store(window, batch.path_TP[row])
    memory.value_all(batch, value_A)
    new = [memory.open_window() for _ in range(6)]
    everyone = memory.begin([*windows, *new], [[row] for row in range(8)])
    memory.value_all(everyone, later_A)  # asks new requests first
    assert value_A.max() > 0 and (later_A >= value_A).all()


def test_an_expert_stays_unused_where_every_request_leaves_it_so() -> None:
    """Past use, which is of whole forwards, counts once and not for each request."""
    memory, none = TokenMemory(SPEC, 200, 8), np.zeros(64, bool)
    windows = [memory.open_window() for _ in range(3)]
    for token_LK in walk(30):
        batch = memory.begin(windows, [[0], [1], [2]])
        for layer in range(SPEC.num_layers):
            memory.observe(batch, layer, [((token_LK[layer] + 5 * row) % 16).tolist() for row in range(3)])
            if layer + 1 == SPEC.num_layers:
                break
            rest_E, masses, use_E = np.ones(16), [], memory.use_A[16 * layer + 16 : 16 * layer + 32].copy()
            for row, window in enumerate(windows):
                memory.expect(alone_in(batch, row), layer + 1, NEVER, none)
                shared_N = memory.now_WN[window.index]
                most = np.sort(shared_N)[::-1][:8]
                weight_M = np.exp(-token_memory.SHARPNESS * (most[0] - most) / 8)
                masses.append(weight_M[weight_M >= 1e-3].sum() if len(memory.state()["path_RP"]) > 8 else 0.0)
                share = token_memory.PRIOR / (masses[-1] + token_memory.PRIOR)
                if masses[-1]:
                    rest_E *= (memory.unused_E - share * (1 - use_E)) / (1 - share)
            memory.expect(batch, layer + 1, NEVER, none)
            if all(masses):
                share = token_memory.PRIOR / (np.mean(masses) + token_memory.PRIOR)
                expected_E = (1 - share) * rest_E + share * (1 - use_E)
                np.testing.assert_allclose(memory.unused_E, expected_E, atol=2e-3)
        for row, window in enumerate(windows):
            memory.store(window, batch.path_TP[row])


def test_nothing_is_prefetched_where_a_forward_needs_more_than_all_slots() -> None:
    loads = []
    for requests in (1, 3):
        residency, routes_TLK = made(slots=12), walk(300)  # three for each event
        for token in range(200):
            rows = routes_TLK[[token + 21 * request for request in range(requests)]]
            forward, events = make_forward(SPEC, rows, forward_id=token)
            info = replace(forward, request_T=tuple(range(requests)))
            residency.begin_forward(info)
            for event in events:
                residency.event(replace(event, forward=info))
            residency.end_forward(info)
        loads.append(residency.counts.prefetch_loads)
    assert loads[0] > 100 and loads[1] < 10


def test_a_prefetch_takes_no_place_of_what_the_same_layer_needs() -> None:
    policy = build_policy("foresight", SPEC, {}, SLOTS)
    info, events = next(forwards(walk(1)))
    policy.begin_request(0)
    policy.begin_forward(info)
    policy.gate(events[0], [], [SPEC.expert_key(0, 0)])
    policy.after_first_expert(events[0])
    key, victim = SPEC.expert_key(1, 2), SPEC.expert_key(1, 3)
    for unused, taken in ((0.99, True), (0.5, False), (0.1, False)):
        policy.memory.unused_E[[2, 3]] = 0.05, unused
        assert (policy.evict_among_for_prefetch(key, [victim], [victim]) == victim) == taken


def test_all_loops_are_compiled_before_the_first_event() -> None:
    compile_loops()
    kernels = [kernel for kernel in vars(token_kernels).values() if hasattr(kernel, "signatures")]
    before = [len(kernel.signatures) for kernel in kernels]
    assert len(kernels) > 10
    for name in ("prefetch", "waste"):
        drive(made(**{name: 1}), walk(40))
    requests = made()
    for row in range(30):
        forward, events = make_forward(SPEC, walk(40)[row : row + 3], forward_id=row)
        info = replace(forward, request_T=(0, 1, 2))
        requests.begin_forward(info)
        for event in events:
            requests.event(replace(event, forward=info))
        requests.end_forward(info)
    assert [len(kernel.signatures) for kernel in kernels] == before


@pytest.mark.parametrize("row, value", [(0, -1), (99, 0), (3, 16)])
def test_stored_routes_are_whole_rows_and_then_none(row: int, value: int) -> None:
    predictor = counted(60, tokens=100)
    predictor.validate()
    predictor.path_FLK[row, -1, -1] = value
    with refused(ValueError, "range"):
        predictor.validate()
