"""Cheap signals of a token's coming experts during a run: one number per signal and expert.

    constant    1
    path        the logit of a path network (`predictors/path_mlp.py`)
    states      the logit of a network on hidden states (`predictors/promoe.py`), if known
    popularity  frequency in the layer's training tokens
    affinity    frequency after the experts just chosen, from layer to layer
    habit       frequency in the request, at two decay rates
    last        whether the request's last token used it
    memory      the vote of the paths most similar to the token's (`moetool.prediction.route_memory`)
    own         the vote of those among them from the same request
    ahead       the score of the layer's router on this layer's hidden states, if known

Shares enter by their logarithm, a vote also directly. `predictors/fused.py` learns the trust in each.

Shapes:
    S  signals     G  confidence of the memory, which gates some trust     C, N  as in `moetool.prediction.route_memory`
    T, L, K, E as everywhere; H  hidden width of the network
"""

import math
from collections.abc import Mapping

import numpy as np

from moetool.base.types import GateEvent
from moetool.prediction.route_memory import EVERYONE, Neighbours, RouteMemory, RouteSearch, roots

SIGNALS = (
    "constant",
    "path",
    "states",
    "popularity",
    "affinity",
    "habit",
    "late habit",
    "last",
    "memory",
    "log memory",
    "own",
    "log own",
    "ahead",
)
GIVEN = 3
"""Number of leading signals without a table or memory."""
CONTEXT = 3
"""G: similarity of the best path, of the request's own best path, and number of tokens of the request."""
_DECAYS = (0.97, 0.8)
_FLOOR = 0.01


class Running:
    """Past routes of a running request.

    Attributes:
        last_LK: experts of its last token; None for its first forward.
        use_RLE: decayed use of each expert, for each rate.
        last_C, last_row: similarity of each path to its last token's, and that token's row in the memory.
        num_tokens: tokens in earlier forwards.
    """

    __slots__ = ("last_C", "last_LK", "last_row", "num_tokens", "use_RLE")

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.last_LK: np.ndarray | None = None
        self.last_C: np.ndarray | None = None
        self.last_row = -1
        self.use_RLE = np.zeros((len(_DECAYS), num_layers, num_experts), np.float32)
        self.num_tokens = 0

    def update(self, experts_TLK: np.ndarray) -> None:
        """Add the tokens of a forward, in order."""
        num_tokens, num_layers, _ = experts_TLK.shape
        layers_L1 = np.arange(num_layers)[:, None]
        for use_LE, decay in zip(self.use_RLE, _DECAYS, strict=True):
            use_LE *= decay**num_tokens
            for back, experts_LK in enumerate(experts_TLK[::-1][:128]):
                use_LE[layers_L1, experts_LK] += (1 - decay) * decay**back
        self.last_LK = experts_TLK[-1]
        self.num_tokens += num_tokens


class PathSignals:
    """Observes forwards and returns the signals of any coming layer.

    Args:
        popularity_LE, affinity_MEE: tables of `predictors.popularity` and `predictors.affinity`.
        net: weights of `predictors.path_mlp.PathNet` by name, or None: the signal `path` is then 0.
        states: parameters and buffers of `predictors.promoe.Predictor` by name, or None: the signal `states` is then 0,
            as for layers beyond those networks' reach.

    Attributes:
        memory: memory of their paths, and of earlier requests'.

    Effects: `observe` of a forward's last layer stores its tokens in the memory, owned by their request. A request that
    is missing from a forward has ended, and its paths become visible to all.
    """

    def __init__(
        self,
        popularity_LE: np.ndarray,
        affinity_MEE: np.ndarray,
        memory: RouteMemory,
        net: Mapping[str, np.ndarray] | None,
        states: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.num_layers, self.num_experts = popularity_LE.shape
        self._popularity_LE = np.log(popularity_LE + _FLOOR / self.num_experts)
        self._affinity_MEE = affinity_MEE
        self._floor = np.float32(_FLOOR)
        self.memory = memory
        self.running: dict[int, Running] = {}
        self.ended: list[int] = []  # requests that ended since the current forward began
        self._net, self._states = net, states
        if net is not None:
            self._fade_H = 1 / (1 + np.exp(-net["fade_H"]))

    def observe(self, event: GateEvent) -> None:
        """Observe the event of the next layer; layer 0 begins a new forward."""
        if event.layer == 0:
            self._begin(event)
        layer = self.layer = event.layer
        experts_TK = np.asarray(event.experts_TK, np.int64)
        assert event.weights_TK is not None, "the event lacks the weights that the predictor needs"
        root_TK = roots(event.weights_TK)
        self.experts_TLK[:, layer], self._root_TLK[:, layer] = experts_TK, root_TK
        for request, mine in self.tokens_of.items():
            self._searches[request].observe(experts_TK[mine].tolist(), root_TK[mine])
        self._near: list[tuple[Neighbours, Neighbours]] = []
        self._chain = [self._affinity_MEE[layer][experts_TK].mean(axis=1)] if layer + 1 < self.num_layers else []
        self._ahead_ATE = event.ahead_ATE
        if self._net is not None:
            now_FH = self._net["now_LFH"][layer]
            scale = np.float32(math.sqrt(experts_TK.shape[1]))
            self._z_TH *= self._fade_H
            self._z_TH += now_FH[experts_TK].sum(axis=1)
            self._z_TH += np.einsum("tkh,tk->th", now_FH[self.num_experts + experts_TK], root_TK * scale)
            self._hidden_TH = np.maximum(self._z_TH + self._before_TH + self._net["phase_LH"][layer], 0)
        if self._states is not None and layer + 1 < self.num_layers:
            assert event.hidden_TD is not None, "the event lacks the hidden states that the predictor needs"
            x_TD = (event.hidden_TD - self._states["mean_MD"][layer]) * self._states["scale_MD"][layer]
            self._inner_TH = np.maximum(x_TD @ self._states["in_MDH"][layer] + self._states["in_MH"][layer], 0)
        if layer + 1 == self.num_layers:
            for request, mine in self.tokens_of.items():
                running = self.running[request]
                running.update(self.experts_TLK[mine])
                running.last_C = self._searches[request].similarities(len(mine) - 1, alone=True)
                added = self.experts_TLK[mine], self._root_TLK[mine], request
                running.last_row = self.memory.add(*added, running.last_row)

    def signals(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each signal for the experts of a coming layer, and the memory's confidence.

        Shapes: float32 [T, E, S] and [T, G].
        """
        num_tokens = len(self.experts_TLK)
        f_TES = np.zeros((num_tokens, self.num_experts, len(SIGNALS)), np.float32)
        context_TG = np.zeros((num_tokens, CONTEXT), np.float32)
        f_TES[..., 0] = 1
        if self._net is not None:
            f_TES[..., 1] = self._hidden_TH @ self._net["out_LHE"][layer] + self._net["bias_LE"][layer]
        if self._states is not None:
            heads = slice((layer - self.layer - 1) * self.num_experts, (layer - self.layer) * self.num_experts)
            if heads.stop <= self._states["out_MF"].shape[1]:
                out_HE = self._states["out_MHF"][self.layer, :, heads]
                f_TES[..., 2] = self._inner_TH @ out_HE + self._states["out_MF"][self.layer, heads]
        f_TES[..., 3] = self._popularity_LE[layer]
        while len(self._chain) < layer - self.layer:
            self._chain.append(self._chain[-1] @ self._affinity_MEE[self.layer + len(self._chain)])
        f_TES[..., 4] = np.log(self._chain[layer - self.layer - 1] + self._floor)
        if not self._near:
            self._find()
        for request, mine in self.tokens_of.items():
            running = self.running[request]
            f_TES[mine, :, 5:7] = np.log(running.use_RLE[:, layer].T + self._floor)
            context_TG[mine, 2] = math.log1p(running.num_tokens) / 4
            if running.last_LK is not None:
                f_TES[np.array(mine)[:, None], running.last_LK[layer], 7] = 1
        for token, (near, own) in enumerate(self._near):
            f_TES[token, :, 8] = near.vote(self.memory, layer, self.num_experts)
            f_TES[token, :, 10] = own.vote(self.memory, layer, self.num_experts)
            context_TG[token, :2] = near.best, own.best
        f_TES[..., 9:12:2] = np.log(f_TES[..., 8:11:2] + self._floor)
        if self._ahead_ATE is not None and layer - self.layer <= len(self._ahead_ATE):
            f_TES[..., 12] = np.log(
                np.maximum(self._ahead_ATE[layer - self.layer - 1], 0) + np.float32(0.1 / self.num_experts)
            )
        return f_TES, context_TG

    def _begin(self, event: GateEvent) -> None:
        info = event.forward
        request_T, position_T = np.array(info.request_T), np.array(info.position_T)
        self.tokens_of = {r: np.flatnonzero(request_T == r).tolist() for r in dict.fromkeys(info.request_T)}
        self.ended = [r for r in self.running if r not in self.tokens_of]
        self.ended += [r for r, mine in self.tokens_of.items() if r in self.running and (position_T[mine] == 0).any()]
        for request in self.ended:
            del self.running[request]
            self.memory.release(request)
        num_tokens, top_k = len(request_T), len(event.experts_TK[0])
        self.experts_TLK = np.zeros((num_tokens, self.num_layers, top_k), np.int64)
        self._root_TLK = np.zeros(self.experts_TLK.shape, np.float32)
        self._searches: dict[int, RouteSearch] = {}
        width = 0 if self._net is None else len(self._fade_H)
        self._z_TH = np.zeros((num_tokens, width), np.float32)
        self._before_TH = np.zeros_like(self._z_TH)
        owner_C = self.memory.owner_C[: self.memory.size]
        private = owner_C != EVERYONE
        for request, mine in self.tokens_of.items():
            if request not in self.running:
                self.running[request] = Running(self.num_layers, self.num_experts)
            own = owner_C == request
            self._searches[request] = RouteSearch(
                self.memory,
                len(mine),
                np.flatnonzero(own),
                np.flatnonzero(private & ~own),
                self.running[request].last_C,
            )
            last_LK = self.running[request].last_LK
            if self._net is not None and last_LK is not None:
                before_H = self._net["before_LEH"][np.arange(self.num_layers)[:, None], last_LK].sum(axis=(0, 1))
                self._before_TH[mine] = before_H

    def _find(self) -> None:
        """Find the paths most similar to each token's, among all and among its request's own."""
        found: dict[int, tuple[Neighbours, Neighbours]] = {}
        for request, mine in self.tokens_of.items():
            search = self._searches[request]
            for number, token in enumerate(mine):
                similarity_C = search.similarities(number)
                found[token] = Neighbours(None, similarity_C), Neighbours(search.own, similarity_C[search.own])
        self._near = [found[token] for token in range(len(self.experts_TLK))]
