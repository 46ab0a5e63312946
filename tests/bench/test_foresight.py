"""Kept hits of foresight on published routes, and what knowledge of the coming routes would add.

    python -m pytest tests/bench/test_foresight.py -m '' -s

DeepSeek-V2-Lite: with every other sequence of two tasks stored, it is scored on 1,500 tokens of the other sequences of
the first, and of a task that it has never seen on the 1,500 tokens after the first 1,000. The toy model: on requests of
stored tasks. Prefetching is off, so that every hit is kept.

Known routes: the first 2,000 tokens of three traces, of which the later half counts. `KnownRoutes` is foresight that
knows the next events exactly.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.layer_slots import equal_slots
from moetool.caching.policies import foresight
from moetool.caching.policy import Policy, build_policy
from moetool.caching.residency import Counts, Residency
from moetool.capture.run import CaptureOptions, capture
from moetool.prediction.token_memory import DISCOUNT, RECALL, TokenMemory
from moetool.prompts import gather as prompt_sets
from moetool.trace.foreign.importing import import_trace
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.formats import topk_parquet
from moetool.trace.reader import Trace
from moetool.training.predictor import Predictor, build
from moetool.training.tokens import Tokens
from tests.published_routes import DEEPSEEK, QWEN, needs_routes
from tests.synthetic import make_forward

SHARES = (0.125, 0.25, 0.5)
WARM, SCORED = 1000, 1500
EPOCHS = 15
OFF: dict[str, object] = {"prefetch": False}

pytestmark = [pytest.mark.slow, needs_routes]

Sequences = list[np.ndarray]
Run = tuple[str, str, dict[str, object], Predictor | None]  # title, policy (`by layer`: each its own pool), options
COLD_RUNS: list[Run] = [
    ("lru", "lru", {}, None),
    ("lfu", "lfu", {}, None),
    ("lru by layer", "lru by layer", {}, None),
    ("cold", "foresight", OFF, None),
    ("cold by layer", "foresight by layer", OFF, None),
    ("belady", "belady", {}, None),
]


def all_runs(model: Predictor) -> list[Run]:
    """The cold ones, and foresight with these tokens stored."""
    return [*COLD_RUNS, ("warm", "foresight", OFF, model), ("warm by layer", "foresight by layer", OFF, model)]


def sequences(task: str) -> tuple[ModelSpec, Sequences]:
    """The spec, and experts [T, L, K] of each sequence."""
    routes = topk_parquet.read_routes(DEEPSEEK / f"{task}.parquet", ModelFacts())
    shape = (-1, routes.spec.num_layers, routes.spec.top_k_L[0])
    return routes.spec, [sequence.experts_TS.astype(np.int64).reshape(shape) for sequence in routes.sequences]


def first_tokens(parts: Sequences, num_tokens: int) -> Sequences:
    taken: Sequences = []
    for part in parts:
        taken.append(part[: num_tokens - sum(map(len, taken))])
    return [part for part in taken if len(part)]


def counted(spec: ModelSpec, train: Sequences) -> Predictor:
    """`moetool train next_use`, but on these sequences."""
    model = build("next_use", spec)
    request_T = torch.arange(len(train)).repeat_interleave(torch.tensor(list(map(len, train))))
    model.count(Tokens(experts_TPK=torch.from_numpy(np.concatenate(train)), request_T=request_T))
    return model.eval().requires_grad_(False)


def forwards(spec: ModelSpec, parts: Sequences) -> Iterator[tuple[ForwardInfo, list[GateEvent], bool]]:
    """One token a forward, one sequence after the other; and whether its request ends with it."""
    number = 0
    for request, part in enumerate(parts):
        for token in range(len(part)):
            yield *make_forward(spec, part[None, token], forward_id=number, request=request), token == len(part) - 1
            number += 1


def kept(spec: ModelSpec, parts: Sequences, share: float, run: Run, warm: int) -> tuple[float, float]:
    """Share of needed experts that were kept, after `warm` tokens; and milliseconds of processor time a token."""
    _, name, options, predictor = run
    made = list(forwards(spec, parts))
    future = [[spec.expert_key(e.layer, x) for x in e.needed] for _, events, _ in made for e in events]
    slots = int(share * spec.total_experts)
    policy = build_policy(name.removesuffix(" by layer"), spec, options, slots, predictor=predictor, future=future)
    residency = Residency(policy, layer_slots=equal_slots(spec, slots) if name.endswith(" by layer") else ())
    before, began = Counts(), time.process_time()
    for number, (info, events, last) in enumerate(made):
        if number == warm:
            before = residency.counts
        residency.begin_forward(info)
        for event in events:
            residency.event(event)
        residency.end_forward(info)
        if last:
            residency.end_request(info.request_T[0])
    milliseconds = 1e3 * (time.process_time() - began) / len(made)
    counts = residency.counts
    return (counts.kept - before.kept) / (counts.needed - before.needed), milliseconds


def decayed(spec: ModelSpec, parts: Sequences, share: float, half_life: float, warm: int) -> float:
    """Kept hits of evicting by use that is halved every `half_life` forwards: the other history to beat."""
    stride, slots = spec.num_experts, int(share * spec.total_experts)
    use_A, resident_A = np.zeros(spec.num_layers * stride), np.zeros(spec.num_layers * stride, bool)
    gain, growth, hits, needed = 1.0, 2 ** (1 / (half_life * spec.num_layers)), 0, 0
    for number, experts_LK in enumerate(np.concatenate(parts)):
        if gain > 1e100:
            use_A, gain = use_A / gain, 1.0
        for layer, experts_K in enumerate(experts_LK):
            keys = experts_K + layer * stride
            gain *= growth
            use_A[keys] += gain
            if number >= warm:
                hits, needed = hits + int(resident_A[keys].sum()), needed + len(keys)
            resident_A[keys] = True
            while resident_A.sum() > slots:
                others = np.flatnonzero(resident_A & ~np.isin(np.arange(len(use_A)), keys))
                over = int(resident_A.sum()) - slots
                resident_A[others[np.argsort(use_A[others], kind="stable")[:over]]] = False
    return hits / needed


def table(title: str, spec: ModelSpec, parts: Sequences, warm: int, runs: list[Run]) -> dict[str, list[float]]:
    print(f"{title}: kept hits at {', '.join(f'{share:.1%}' for share in SHARES)} of the experts; ms a token at 25 %")
    found: dict[str, list[float]] = {}
    for run in runs:
        results = [kept(spec, parts, share, run, warm) for share in SHARES]
        found[run[0]] = [hits for hits, _ in results]
        print(f"  {run[0]:18}", *(f"{hits:.3f}" for hits, _ in results), f"  {results[1][1]:.2f}", flush=True)
    found["decayed use"] = [max(decayed(spec, parts, share, h, warm) for h in (2, 8, 32, 100)) for share in SHARES]
    print(f"  {'decayed use':18}", *(f"{hits:.3f}" for hits in found["decayed use"]), " (the best of four rates)")
    for name in ("cold", "warm"):
        if name in found:
            print(f"  {name} closes of the gap to Belady:", *(f"{closed:.2f}" for closed in closed_gap(found, name)))
    return found


def closed_gap(found: dict[str, list[float]], name: str) -> list[float]:
    """Share of the gap to Belady, from the best of lru, lfu and lru by layer, that a run closes; nan without a gap."""
    rivals = [max(hits) for hits in zip(found["lru"], found["lfu"], found["lru by layer"], strict=True)]
    zipped = zip(found[name], rivals, found["belady"], strict=True)
    return [(hits - rival) / (bound - rival) if bound > rival else float("nan") for hits, rival, bound in zipped]


@pytest.mark.parametrize("unseen", ["translation", "intent"])
def test_kept_hits(unseen: str) -> None:
    known = "intent" if unseen == "translation" else "translation"
    spec, law = sequences("law")
    other, strange = sequences(known)[1], sequences(unseen)[1]
    held_out = first_tokens(law[1::2], SCORED)
    model = counted(spec, law[::2] + other[::2])
    runs = all_runs(model)
    inside = table(f"law and {known} trained on, law", spec, held_out, 0, runs)
    outside = table(f"{unseen} never seen", spec, first_tokens(strange, WARM + SCORED), WARM, runs)
    for found, least in ((inside, 0.5), (outside, 1 / 3)):
        assert closed_gap(found, "warm")[SHARES.index(0.25)] > least - 0.1


def test_kept_hits_on_the_toy_model(tmp_path: Path) -> None:
    """Every other request of seven tasks is stored; every tenth is scored, its tokens one a forward."""
    capture(
        "reference",
        prompt_sets.load(["all"], max_prompts=16),
        tmp_path / "toy",
        CaptureOptions(keep=("topk",), dtype="float32", batch_size=1),
    )
    trace = Trace(tmp_path / "toy")
    parts: dict[int, Sequences] = {}
    for info, events in trace.forwards(sequential=True, columns=()):
        experts_TLK = np.stack([np.array(event.experts_TK) for event in events], axis=1)
        parts.setdefault(info.request_T[0], []).append(experts_TLK)
    requests = [np.concatenate(part) for part in parts.values()]
    model = counted(trace.spec, requests[::2])
    found = table("toy model, trained on its tasks", trace.spec, requests[1::10], 0, all_runs(model))
    assert closed_gap(found, "warm")[SHARES.index(0.25)] > 0.4


Stream = Sequence[tuple[ForwardInfo, Sequence[GateEvent], Sequence[int]]]  # and the requests that end with the forward


class KnownRoutes(Policy):
    """Foresight that knows the next `known` events exactly.

    Experts that these need stay, the one needed latest goes first. Of the others, it evicts the one whose next use is
    expected latest by foresight's memory, which has already seen these events.
    """

    def __init__(self, spec: ModelSpec, num_slots: int, stream: Stream, known: int) -> None:
        super().__init__(spec, None, num_slots)
        self.options = foresight.Options()
        self.needed = [[spec.expert_key(e.layer, x) for x in e.needed] for _, events, _ in stream for e in events]
        self.known, self.passed, self.seen = known, 0, 0
        self.memory = TokenMemory(spec, self.options.memory, self.options.neighbours)
        self.seen_layers = self.look(stream)
        self.layer = 0
        num = spec.num_layers * spec.num_experts
        self.resident_A, self.value_A = np.zeros(num, bool), np.zeros(num, np.float32)
        self.worth_A: np.ndarray | None = None

    def look(self, stream: Stream) -> Iterator[int]:
        """Show the events to the memory, one at a time; yield their layers."""
        window = self.memory.open_window()  # one request follows another, and foresight keeps their window
        for info, events, _ in stream:
            rows = range(len(info.request_T))
            self.batch = self.memory.begin([window], [rows])
            for event in events:
                self.memory.observe(self.batch, event.layer, event.experts_TK)
                yield event.layer
            for row in rows:
                self.memory.store(window, self.batch.path_TP[row])

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self.passed += 1
        while self.seen < min(self.passed + self.known, len(self.needed)):
            self.layer = next(self.seen_layers)
            self.seen += 1
        self.worth_A = None
        return misses

    def admit(self, key: int, prefetched: bool) -> None:
        self.resident_A[key] = True

    def removed(self, key: int) -> None:
        self.resident_A[key] = False

    def evict(self, locked: Collection[int]) -> int:
        if self.worth_A is None:
            self.memory.value(self.batch, 0, len(self.value_A), self.value_A)
            ahead_L = (np.arange(self.spec.num_layers) - self.layer - 1) % self.spec.num_layers + 1
            near_L = foresight.NEARNESS ** (ahead_L / self.spec.num_layers)
            self.worth_A = self.value_A * near_L.repeat(self.spec.num_experts)
            for number in range(self.seen - 1, self.passed - 1, -1):  # other experts are worth at most 1
                self.worth_A[self.needed[number]] = 2 + self.seen - number
        free_A = self.resident_A.copy()
        free_A[list(locked)] = False
        return int(np.where(free_A, self.worth_A, np.inf).argmin())


def first_requests(trace: Trace, tokens: int) -> tuple[frozenset[int], int]:
    """The first requests with about this number of tokens in all, and their number of tokens."""
    chosen: list[int] = []
    total = 0
    for request, count in zip(*(trace.requests[name].to_pylist() for name in ("request", "tokens")), strict=True):
        if chosen and total + count > tokens:
            break
        chosen.append(request)
        total += count
    return frozenset(chosen), total


def in_time(trace: Trace) -> tuple[Stream, int]:
    """The forwards of the first 2,000 tokens, and the number of tokens in their first half."""
    requests, total = first_requests(trace, 2000)
    left = dict(zip(*(trace.requests[name].to_pylist() for name in ("request", "tokens")), strict=True))
    stream = []
    for info, events in trace.forwards(sequential=True, columns=(), requests=requests):
        for request in info.request_T:
            left[request] -= 1
        stream.append((info, list(events), [request for request in set(info.request_T) if not left[request]]))
    return stream, round(total / 2)


def loaded(policy: Policy, stream: Stream, warm: int, layer_slots: Sequence[int] = ()) -> float:
    """Loads per needed expert after `warm` tokens."""
    residency, tokens, before = Residency(policy, layer_slots=layer_slots), 0, None
    for info, events, ended in stream:
        if before is None and tokens >= warm:
            before = residency.counts
        residency.begin_forward(info)
        for event in events:
            residency.event(event)
        residency.end_forward(info)
        for request in ended:
            residency.end_request(request)
        tokens += len(info.request_T)
    assert before is not None
    counts = residency.counts - before
    return counts.loads / counts.needed


@pytest.mark.parametrize("name", ["law", "qwen3", "toy"])
def test_known_routes(name: str, tmp_path: Path) -> None:
    """To close half of the gap, a policy must know a large part of the next token's route."""
    if name == "toy":
        capture(
            "reference",
            prompt_sets.load(["all"], max_prompts=4),
            tmp_path / name,
            CaptureOptions(dtype="float32", batch_size=1),
        )
    else:
        file = QWEN if name == "qwen3" else DEEPSEEK / "law.parquet"
        import_trace([file], "route_csv" if name == "qwen3" else "topk_parquet", tmp_path / name)
    trace = Trace(tmp_path / name)
    spec, (stream, warm) = trace.spec, in_time(trace)
    layers = spec.num_layers
    steps = (0, 1, layers // 4, layers // 2, 3 * layers // 4, layers, 2 * layers)
    future = [[spec.expert_key(e.layer, x) for x in e.needed] for _, events, _ in stream for e in events]
    print(f"{name}: closed share of the gap to Belady with the next {steps} layers known")
    for share in SHARES:
        slots = round(share * spec.total_experts)
        plain = {
            name: loaded(build_policy(name, spec, {}, slots, future=future), stream, warm)
            for name in ("lru", "lfu", "belady")
        }
        by_layer = loaded(build_policy("lru", spec, {}, slots), stream, warm, equal_slots(spec, slots))
        rival = min(plain["lru"], plain["lfu"], by_layer)
        found = [loaded(KnownRoutes(spec, slots, stream, known), stream, warm) for known in steps]
        closed = [(rival - loads) / (rival - plain["belady"]) for loads in found]
        print(f"  {share:.1%}:", *(f"{part:.2f}" for part in closed), flush=True)
        assert closed[1] - closed[0] < 0.05
        assert share > 0.25 or closed[2] < 0.5


def windows(parts: Sequences, num_experts: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each token: experts used [A]; past use before it [A]; and value of the next use, itself included [A]."""
    for part in parts:
        used_TA = np.zeros((len(part), part.shape[1] * num_experts), np.float32)
        used_TA[np.arange(len(part))[:, None, None], part + num_experts * np.arange(part.shape[1])[:, None]] = 1
        soon_TA, past_TA = used_TA.copy(), np.zeros_like(used_TA)
        for token in range(len(part) - 2, -1, -1):
            soon_TA[token] = np.maximum(used_TA[token], DISCOUNT * soon_TA[token + 1])
        for token in range(1, len(part)):
            past_TA[token] = RECALL * past_TA[token - 1] + (1 - RECALL) * used_TA[token - 1]
        yield used_TA, past_TA, soon_TA


def test_a_trained_network_in_place_of_the_memory() -> None:
    """How much the past routes tell: 10 million parameters, fitted to foresight's own values on the stored tokens."""
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    spec, law = sequences("law")
    layers, experts, num = spec.num_layers, spec.num_experts, spec.num_layers * spec.num_experts
    layer_A = np.arange(num) // experts

    def inputs(used_TA: np.ndarray, past_TA: np.ndarray, token: int, layer: int) -> np.ndarray:
        """The window after this layer: this token's experts up to it, the last token's after it; past use; layer."""
        seen_A, last_A = layer_A <= layer, used_TA[token - 1] if token else np.zeros(num, np.float32)
        newer_A = RECALL * past_TA[token] + (1 - RECALL) * used_TA[token]
        window_A = np.where(seen_A, used_TA[token], last_A)
        return np.concatenate([window_A, np.where(seen_A, newer_A, past_TA[token]), np.arange(layers) == layer])

    known = list(windows(law[::2] + sequences("intent")[1][::2], experts))
    places = [(number, token) for number, made in enumerate(known) for token in range(1, len(made[0]) - 1)]
    net = torch.nn.Sequential(
        torch.nn.Linear(2 * num + layers, 2048), torch.nn.ReLU(), torch.nn.Dropout(0.4), torch.nn.Linear(2048, num)
    )
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=1e-2)
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - epoch / EPOCHS)
        draw.shuffle(places)
        for first in range(0, len(places), 128):
            rows, values = [], []
            for number, token in places[first : first + 128]:
                layer, (used_TA, past_TA, soon_TA) = int(draw.integers(layers)), known[number]
                rows.append(inputs(used_TA, past_TA, token, layer))
                values.append(np.where(layer_A <= layer, soon_TA[token + 1], soon_TA[token]))
            scores = net(torch.from_numpy(np.stack(rows).astype(np.float32)))
            target = torch.from_numpy(np.stack(values).astype(np.float32))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval()
    slots = [int(share * num) for share in SHARES]
    resident = [np.zeros(num, bool) for _ in slots]
    hits, needed = np.zeros(len(slots)), 0
    for used_TA, past_TA, _ in windows(first_tokens(law[1::2], SCORED), experts):
        for token in range(len(used_TA)):
            rows = [inputs(used_TA, past_TA, token, layer) for layer in range(layers)]
            with torch.inference_mode():
                value_LA = net(torch.from_numpy(np.stack(rows).astype(np.float32))).sigmoid().numpy()
            for layer in range(layers):
                keys = np.flatnonzero((used_TA[token] > 0) & (layer_A == layer))
                near_A = foresight.NEARNESS ** (((layer_A - layer - 1) % layers + 1) / layers)
                needed += len(keys)
                for i, resident_A in enumerate(resident):
                    hits[i] += resident_A[keys].sum()
                    resident_A[keys] = True
                    worth_A = np.where(resident_A, value_LA[layer] * near_A, np.inf)
                    worth_A[keys] = np.inf
                    resident_A[np.argsort(worth_A)[: max(0, int(resident_A.sum()) - slots[i])]] = False
    print(f"law: kept hits of a trained network {', '.join(f'{share:.3f}' for share in hits / needed)}")
    assert hits[0] < hits[1] < hits[2]
