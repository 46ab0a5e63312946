"""Foresight: evicts what is needed again latest, as a network predicts it that learns while it runs."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.caching import _policy as policy
from moetool.errors import UsageError
from moetool.learning import next_use_network as next_use
from moetool.learning import past_use
from moetool.learning.next_use_network import NextUse
from moetool.learning.past_use import Past, Sample
from moetool.types import ForwardInfo, GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of Foresight.

    Attributes:
        hidden: width of the network's hidden layer; where a `next_use` predictor is given, its width counts.
        refresh: layers from one look at all experts to the next.
        prefetch: load experts of the next layer ahead, where that is worth it.
        waste: cost of an unused prefetch, in loads that a used one takes off the critical path.
        learn_every: forwards from one step of learning to the next, and four times as many while what was fitted
            predicts better than what learns; 0 learns nothing.
        batch: samples of a step.
        memory: samples kept; each takes 16 bytes for each expert of the model.
        learning_rate: of a new network; a trained one learns at a third of it.
        seed: of the first weights and of the samples that are drawn.
    """

    hidden: int = 256
    refresh: int = 4
    prefetch: bool = True
    waste: float = 1.0
    learn_every: int = 8
    batch: int = 16
    memory: int = 1024
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"hidden": 1, "refresh": 1, "learn_every": 0, "batch": 1, "memory": 1, "seed": 0, "waste": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UsageError(f"policy foresight: {name} is {getattr(self, name)}, expected at least {bound}")
        if not self.learning_rate > 0:
            raise UsageError(f"policy foresight: learning_rate is {self.learning_rate}, expected more than 0")


class Policy(policy.Policy):
    """Evicts the expert whose next use is predicted latest; prefetches for the next layer what is likely enough.

    After every `refresh` layers a network (`moetool.learning.next_use_network`) says for each expert of the model how
    soon it is needed again, from the path of the token so far, the last token's and past use. It goes on learning: some
    forwards later it is known what became of a look at the experts, and a step of gradient descent follows now and
    then. Past use alone is mixed in by how well it predicted what came of late; and where a `next_use` predictor is
    given, the network as it was fitted is asked in place of the one that learns, as long as it predicts better. It
    works without; predictors of other kinds it leaves alone.

    A prefetch is worth its probability of use, less that of no use times its price (`waste`, in loads) and the value
    of the expert that has to go for it; where that is not above zero, it is not made. Nothing is prefetched for the
    first layer.

    Every request of a forward has a path of its own, of a prompt's tokens the last; an expert is as valuable as the
    request that wants it most has it, and past use is that of whole forwards.

    Its matrix products are those of the machine's BLAS: on another machine, or with other threads for them, sums may
    differ in their last bits, and decisions with them.

    Measured on routes of DeepSeek-V2-Lite with slots for a quarter of the experts and no prefetching
    (tests/bench/test_foresight.py), hits: on a task that the predictor was trained on 0.63 (0.55 without a predictor;
    LRU 0.47, decayed use 0.48, Belady 0.72); on one that it never saw, after 1,000 tokens, 0.71 (LRU 0.59, LFU 0.66,
    Belady 0.80).

    Source: ours.
    """

    prefetch_distance = 1

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        if predictor is not None and self.uses(predictor):
            learned, trained = predictor.weights(), True
        else:
            learned, trained = next_use.fresh(spec, options.hidden, np.random.default_rng(options.seed)), False
        self.net = NextUse(
            spec,
            learned,
            memory=options.memory,
            learning_rate=options.learning_rate,
            batch=options.batch,
            seed=options.seed,
            trained=trained,
        )
        self._past = Past(spec)
        self._resident_A = np.zeros(spec.num_layers * spec.num_experts, bool)
        self._value_A = np.zeros(len(self._resident_A), np.float32)
        self._nearness_LA = _nearness(spec)
        self._order: list[int] = []  # residents of the last look, the next to go last
        self._chance: dict[int, float] = {}  # of what is to be prefetched
        self._requests: dict[int, _Request] = {}
        self._heirless: dict[int, _Request] = {}  # of requests that are over, by their number
        self._running: list[tuple[int, _Request]] = []  # with the row of its last token
        self._used: list[int] = []  # by layers of this forward that the features do not know yet
        self._known_layers = self._seen_layers = 0
        self._hidden_RH = np.zeros((0, 0), np.float32)
        self._forwards = 0

    @classmethod
    def uses(cls, predictor: Any = None) -> bool:
        return predictor is None or getattr(predictor, "weights", None) is not None

    def begin_request(self, request: int) -> None:
        # The lowest number, not who ended first: a server learns of an end later than a replay does.
        self._requests[request] = self._heirless.pop(min(self._heirless)) if self._heirless else _Request()
        self._requests[request].before = None

    def end_request(self, request: int) -> None:
        self._heirless[request] = self._requests.pop(request)

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        self._past.begin_forward()
        last_row = {request: row for row, request in enumerate(info.request_T)}
        self._running = [(row, self._requests[request]) for request, row in last_row.items()]
        self.net.take_in(self._past)
        for _, request in self._running:
            request.now.clear()
            request.followed = 0
            request.z_H = self.net.begin_path(request.before)
        self._used.clear()
        self._known_layers = self._seen_layers = 0
        return ()

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        base = event.layer * self.spec.num_experts
        self._used += [base + expert for expert in event.needed]
        for row, request in self._running:
            request.now += [base + expert for expert in event.experts_TK[row]]
        self._seen_layers += 1
        if event.layer % self.options.refresh == 0:
            self._look(event.layer)
        return misses

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        coming = event.layer + 1
        if not self.options.prefetch or coming == self.spec.num_layers:
            return ()
        if event.layer % self.options.refresh:
            self._hidden_RH = self._hidden(event.layer)
        chance_E = self.net.chances(self._hidden_RH, self._past, coming)
        base = coming * self.spec.num_experts
        span = slice(base, base + self.spec.num_experts)
        worth_E = chance_E - (1 - chance_E) * self.options.waste
        found = np.flatnonzero((worth_E > 0) & ~self._resident_A[span])
        ordered = found[np.argsort(-chance_E[found], kind="stable")]
        self._chance = dict(zip((ordered + base).tolist(), chance_E[ordered].tolist(), strict=True))
        return list(self._chance)

    def admit(self, key: int, prefetched: bool) -> None:
        self._resident_A[key] = True

    def removed(self, key: int) -> None:
        self._resident_A[key] = False

    def evict(self, locked: Collection[int]) -> int:
        while self._order:
            key = self._order.pop()
            if self._resident_A[key] and key not in locked:
                return key
        self._rank(locked)
        return self._order.pop()

    def evict_among(self, candidates: Collection[int], residents: Collection[int]) -> int:
        return min(candidates, key=self._value_A.__getitem__)

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        victim = self.evict(locked)
        if self._worth(key, victim):
            return victim
        self._order.append(victim)
        return None

    def evict_among_for_prefetch(self, key: int, candidates: Collection[int], residents: Collection[int]) -> int | None:
        victim = self.evict_among(candidates, residents)
        return victim if self._worth(key, victim) else None

    def end_forward(self, info: ForwardInfo) -> None:
        whole = self._seen_layers == self.spec.num_layers
        if whole:
            self._past.pass_layers(self._known_layers, self.spec.num_layers, self._used)
        for _, request in self._running:
            if not whole:
                request.break_off()
            elif (settled := request.step(self.spec)) is not None:
                self.net.remember(settled)
        self._forwards += 1
        if self.options.learn_every and self._forwards % (self.options.learn_every * self.net.pace) == 0:
            self.net.learn()

    def state(self) -> dict[str, np.ndarray]:
        return {**self.net.state(), "past_use_RA": self._past.use_RA, "past_age_A": self._past.age_A}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        own = self.state()
        if found := sorted(name for name in own.keys() | state.keys() if _shape(own, name) != _shape(state, name)):
            raise ValueError(f"{found[0]} is {_shape(state, found[0])}, expected {_shape(own, found[0])}")
        self.net.restore(state)
        self._past.restore(state["past_use_RA"], state["past_age_A"])

    def _worth(self, key: int, victim: int) -> bool:
        chance = self._chance[key]
        return chance > (1 - chance) * (self.options.waste + float(self._value_A[victim]))

    def _look(self, layer: int) -> None:
        """Predict all experts' next use, from after the router of `layer`."""
        self._past.pass_layers(self._known_layers, layer + 1, self._used)
        self._used.clear()
        self._known_layers = layer + 1
        self._hidden_RH = self._hidden(layer)
        self._value_A = self.net.values(self._hidden_RH, self._past) * self._nearness_LA[layer]
        self._rank(())
        looks = -(-self.spec.num_layers // self.options.refresh)
        if self.options.learn_every and layer == self._forwards % looks * self.options.refresh:
            for _, request in self._running:
                request.sample = Sample(layer, request.now.copy(), request.before, self._past.features_FA)

    def _hidden(self, layer: int) -> np.ndarray:
        for _, request in self._running:
            self.net.follow_path(request.z_H, request.now[request.followed :])
            request.followed = len(request.now)
        return self.net.hidden_RH([request.z_H for _, request in self._running], layer)

    def _rank(self, locked: Collection[int]) -> None:
        keys = np.flatnonzero(self._resident_A)
        if locked:
            keys = keys[~np.isin(keys, list(locked))]
        self._order = keys[np.argsort(self._value_A[keys], kind="stable")[::-1]].tolist()


class _Request:
    """The paths of a request's last tokens, and the samples whose future is not known yet.

    Of a request that is over, the next new one takes up both: what was loaded for the one is there for the other.
    """

    def __init__(self) -> None:
        self.now: list[int] = []
        self.z_H = np.zeros(0, np.float32)
        self.followed = 0  # keys of `now` that are in `z_H`
        self.before: np.ndarray | None = None
        self.sample: Sample | None = None
        self._steps: deque[tuple[np.ndarray, Sample | None]] = deque()

    def step(self, spec: ModelSpec) -> Sample | None:
        """The forward is over; answers a sample whose future is known now."""
        self.before = np.array(self.now)
        self._steps.append((self.before, self.sample))
        self.sample = None
        if len(self._steps) <= past_use.HORIZON:
            return None
        _, sample = self._steps[0]
        if sample is not None:
            sample.settle([path for path, _ in self._steps], spec)
        self._steps.popleft()
        return sample

    def break_off(self) -> None:
        """The forward came to no end; nothing is learned across it."""
        self.before = self.sample = None
        self._steps.clear()


def _nearness(spec: ModelSpec) -> np.ndarray:
    """discount ** (share of a forward from each layer to an expert's next chance of use): float32 [L, A]."""
    layer_L = np.arange(spec.num_layers)
    ahead_LL = (layer_L - layer_L[:, None] - 1) % spec.num_layers + 1
    nearness_LL = past_use.DISCOUNT ** (ahead_LL / spec.num_layers)
    return np.repeat(nearness_LL, spec.num_experts, axis=1).astype(np.float32)


def _shape(arrays: Mapping[str, np.ndarray], name: str) -> tuple[int, ...] | None:
    return arrays[name].shape if name in arrays else None
