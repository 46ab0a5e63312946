"""Fused: learned trust in each cheap signal of a coming expert, by layer, distance and recent success.

    logit = sum over signals s of trust[s] signal[s]
    trust[s] = trust[d, s] + trust[l, s] + sum over g of context[g] gate[g, s] + offset[s]

for layer l predicted from d layers before. `moetool.prediction.path_signals` has the signals: popularity, affinity, the
request's habits and last token, the path network of `path_mlp`, and votes of a memory of paths. With `ahead` it adds
the router's scores on earlier hidden states, and with `states` the networks of `promoe` on them; both are on by default
if the trace has the columns. `context` holds the similarity of the memory's best paths and the number of tokens. A
forward through resident experts (`resident_forward`) is not a signal, since it takes about as long as the layer.

It learns online. The memory adds each forward: at once for its own request, and for others after that request's end.
`offset` follows the gradient of the loss of the next layer's prediction in the same way. If a single signal has
recently been right more often than the fused logits, it ranks the experts (`moetool.prediction.path_trust.HitRecord`),
which helps on unfamiliar tasks.

Source: moetool. One run fits all parts. The networks learn from most training requests, and the trust, by binary
cross-entropy, from every eighth. The networks never learn from the latter, and the memory hides their paths during the
fit, so the trust reflects unseen requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moetool.training.predictor
from moetool.base.config import DROPPED, Span, require_within
from moetool.base.types import GateEvent, ModelSpec
from moetool.prediction.path_signals import CONTEXT, SIGNALS, PathSignals
from moetool.prediction.path_trust import DISTANCES, FusedPath
from moetool.prediction.route_memory import RouteMemory
from moetool.training.tokens import Tokens
from moetool.training.trust_samples import TrustSamples
from predictors import promoe
from predictors.affinity import affinity
from predictors.path_mlp import PathNet
from predictors.popularity import popularity

_JUDGED_OF = 8  # one training request in eight fits the trust
_FIRST_TRUST = {"path": 0.6, "log memory": 0.3, "log own": 0.1}
_STEEP = 4.0  # factor of the fitted trust, for larger steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of Fused.

    Attributes:
        hidden, dropout, forget: options of the path network.
        paths: maximum stored paths of training tokens, evenly spaced.
        recent: maximum stored paths of served tokens; 0 disables this learning.
        haste: learning rate of `offset`; 0 keeps the fitted trust.
        ahead: whether to use the router's scores on earlier hidden states (needs the column `ahead`).
        states: whether to use hidden states (needs the column `hidden`).
        stride: distance of the networks on hidden states, in layers.
    """

    hidden: int = 512
    dropout: float = 0.2
    forget: float = 0.2
    paths: int = 10240
    recent: int = 4096
    haste: float = 0.1
    ahead: bool = False
    states: bool = False
    stride: int = 8

    def __post_init__(self) -> None:
        one = Span(1)
        require_within(self, "fused: ", hidden=one, paths=one, recent=Span(0), stride=one)
        require_within(self, "fused: ", dropout=DROPPED, forget=DROPPED, haste=Span(0))


class Predictor(moetool.training.predictor.Predictor):
    """Scores an expert by its fused logit.

    Attributes:
        net: path network.
        states: networks on hidden states, if used; else None.

    Shapes: parameters trust_DS (D distances of `DISTANCES`), trust_LS, gate_GS, all divided by `_STEEP`; buffers
        popularity_LE, affinity_MEE (M = L-1), experts_CLK int16, weights_CLK float16 and before_C int32, the memory,
        of which the first `num_paths` are in use.
    """

    needs = frozenset({"experts", "weights"})
    learned = True
    remembers = True
    looks_at: ClassVar[Mapping[str, str]] = {"ahead": "ahead", "hidden": "states"}
    scores_are = "logits"
    popularity_LE: Tensor
    affinity_MEE: Tensor
    experts_CLK: Tensor
    weights_CLK: Tensor
    before_C: Tensor
    num_paths: Tensor

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        if options.ahead:
            self.needs = self.needs | {"ahead"}
        if options.states:
            self.needs = self.needs | {"hidden"}
        L, E, K, S = self.num_layers, self.num_experts, self.top_k, len(SIGNALS)
        self.lookahead = L
        self.net = PathNet(L, E, K, options.hidden, options.dropout)
        self.states = promoe.Predictor(spec, promoe.Options(stride=options.stride)) if options.states else None
        first_S = torch.tensor([_FIRST_TRUST.get(name, 0.0) for name in SIGNALS])
        if options.ahead:
            first_S[SIGNALS.index("ahead")] = 0.5
        if options.states:
            first_S[SIGNALS.index("states")] = 0.5
        self.trust_DS = nn.Parameter(first_S.repeat(len(DISTANCES), 1) / _STEEP)
        self.trust_LS = nn.Parameter(torch.zeros(L, S))
        self.gate_GS = nn.Parameter(torch.zeros(CONTEXT, S))
        self.register_buffer("popularity_LE", torch.zeros(L, E))
        self.register_buffer("affinity_MEE", torch.zeros(L - 1, E, E))
        self.register_buffer("experts_CLK", torch.zeros(options.paths, L, K, dtype=torch.int16))
        self.register_buffer("weights_CLK", torch.zeros(options.paths, L, K, dtype=torch.float16))
        self.register_buffer("before_C", torch.full((options.paths,), -1, dtype=torch.int32))
        self.register_buffer("num_paths", torch.zeros((), dtype=torch.int64))
        self._source_C = np.zeros(0, np.int64)  # request of each path, during training
        self.parts: list[TrustSamples] = []
        self.path: FusedPath | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of parameters, buffers, and the index over all storable paths."""
        rows = int(self.num_paths) + self.options.recent
        return super().num_bytes + 4 * self.num_layers * (self.num_experts + 1) * rows

    def reach(self, ahead: int) -> int:
        """Return its lookahead, which does not depend on known gates."""
        return self.lookahead

    def validate(self) -> None:
        super().validate()
        experts_CLK, before_C, num_paths = self.experts_CLK.numpy(), self.before_C.numpy(), int(self.num_paths)
        if not 0 <= num_paths <= len(before_C):
            raise ValueError(f"num_paths is {num_paths}, expected 0 to {len(before_C)}")
        if experts_CLK.size and not 0 <= experts_CLK.min() <= experts_CLK.max() < self.num_experts:
            raise ValueError(f"experts_CLK has experts that are not among the {self.num_experts} of a layer")
        if before_C.size and not -1 <= before_C.min() <= before_C.max() < max(1, num_paths):
            raise ValueError(f"before_C names paths that are not among the {num_paths}")
        if bool((self.weights_CLK < 0).any()):
            raise ValueError("weights_CLK has weights below 0")

    def count(self, tokens: Tokens) -> None:
        assert tokens.request_T is not None and tokens.weights_TPK is not None
        experts_NLK = tokens.experts_TPK.numpy()
        self.popularity_LE.copy_(torch.from_numpy(popularity(experts_NLK, self.num_experts)))
        self.affinity_MEE.copy_(torch.from_numpy(affinity(experts_NLK, self.num_experts)))
        self.net.begin_at(experts_NLK)
        if self.states is not None:
            self.states.count(tokens)
        kept = min(len(tokens), len(self.experts_CLK))
        rows = torch.from_numpy(((np.arange(kept) + 0.5) * len(tokens) / kept).astype(np.int64))
        self.experts_CLK[:kept] = tokens.experts_TPK[rows].to(torch.int16)
        self.weights_CLK[:kept] = tokens.weights_TPK[rows].to(torch.float16)
        self.num_paths.fill_(kept)
        self._source_C = tokens.request_T[rows].numpy()
        follows_C = np.zeros(kept, bool)
        follows_C[1:] = (np.diff(rows.numpy()) == 1) & (np.diff(self._source_C) == 0)
        self.before_C[:kept] = torch.from_numpy(np.where(follows_C, np.arange(kept) - 1, -1))
        self.parts, self.path = [], None

    def prepare(self, tokens: Tokens) -> Tokens:
        """Order tokens by request, and number them over all calls.

        Effects: replays the requests that fit the trust, and stores the signals.
        """
        assert tokens.request_T is not None
        order_T = tokens.request_T.argsort(stable=True)
        ordered = replace(tokens, hidden_TPD=None).take(order_T)  # hidden states are wide, possibly in a file
        assert ordered.request_T is not None
        requests = ordered.request_T.unique().tolist()
        counted = set(self._source_C.tolist())
        judged = [r for r in requests if r not in counted] or requests[_JUDGED_OF // 2 :: _JUDGED_OF] or requests[-1:]
        start = sum(len(part) for part in self.parts)
        part = TrustSamples(
            self.signals(with_net=False),
            self._source_C,
            ordered,
            judged,
            learns=len(requests) > len(judged),
            hidden=None if tokens.hidden_TPD is None else (tokens.hidden_TPD, order_T),
        )
        self.parts.append(part)
        return replace(ordered, example_T=torch.arange(start, start + len(ordered)))

    def signals(self, *, with_net: bool) -> PathSignals:
        """Return new signals from the counts, optionally with the network."""
        num = int(self.num_paths)
        paths = self.experts_CLK[:num].numpy(), self.weights_CLK[:num].numpy(), self.before_C[:num].numpy()
        net = {name: value.detach().numpy() for name, value in self.net.named_parameters()}
        states = None
        if with_net and self.states is not None:
            states = {name: value.numpy() for name, value in self.states.state_dict().items()}
        return PathSignals(
            self.popularity_LE.numpy(),
            self.affinity_MEE.numpy(),
            RouteMemory(paths, self.num_experts, self.options.recent),
            net if with_net else None,
            states,
        )

    def loss(self, tokens: Tokens, layer_N: Tensor) -> Tensor:
        """Return the networks' loss over their training tokens plus that of the fused logits over judged tokens."""
        assert tokens.example_T is not None, "made by `prepare`"
        device, example_N = layer_N.device, tokens.example_T.cpu()
        for part in self.parts:
            if not len(example_N) or int(example_N.min()) < len(part):
                break
            example_N = example_N - len(part)
        before_NLE = part.before(example_N).to(device)
        if self.states is not None:
            tokens = replace(tokens, hidden_TPD=part.hidden(example_N).to(device))
        row_N = part.judged_N[example_N]
        mine_N = (row_N < 0).to(device) if self.training and part.learns else torch.ones_like(layer_N).bool()
        loss = self.trust_LS.new_zeros(())
        if bool(mine_N.any()):
            mine = tokens.take(mine_N)
            assert mine.weights_TPK is not None
            loss = loss + self.net.loss(mine.experts_TPK, mine.weights_TPK, before_NLE[mine_N], self.options.forget)
            if self.states is not None:
                loss = loss + self.states.loss(mine, layer_N[mine_N])
        judged_N = (row_N >= 0).to(device)
        if bool(judged_N.any()):
            loss = loss + self.judging_loss(tokens.take(judged_N), layer_N[judged_N], before_NLE[judged_N], part, row_N)
        return loss

    def judging_loss(
        self, tokens: Tokens, layer_N: Tensor, before_NLE: Tensor, part: TrustSamples, row_N: Tensor
    ) -> Tensor:
        """Return the binary cross-entropy of the fused logits, mean over tokens, distances and experts."""
        assert tokens.weights_TPK is not None
        rows_N = row_N[row_N >= 0]
        given = part.signals_JLDES[rows_N, layer_N.cpu()].to(layer_N.device).float()  # [N, D, E, S - GIVEN]
        context = part.context_JLDG[rows_N, layer_N.cpu()].to(layer_N.device).float()
        training = self.net.training
        self.net.eval()
        with torch.no_grad():
            x_NLF = self.net.marks(tokens.experts_TPK, tokens.weights_TPK)
            hidden_LNH = self.net.hidden(x_NLF, before_NLE)
            distance_D = torch.tensor(DISTANCES, device=layer_N.device)
            from_ND = layer_N[:, None] - distance_D
            hidden_NDH = hidden_LNH[from_ND.clamp(min=0), torch.arange(len(layer_N), device=layer_N.device)[:, None]]
            path_NDE = torch.bmm(hidden_NDH, self.net.out_LHE[layer_N]) + self.net.bias_LE[layer_N][:, None]
            states_NDE = torch.zeros_like(path_NDE)
            if self.states is not None:
                assert tokens.hidden_TPD is not None
                for index, distance in enumerate(DISTANCES):
                    for last in range(self.num_layers - distance) if distance <= self.states.lookahead else ():
                        mine_N = from_ND[:, index] == last
                        states_NDE[mine_N, index] = self.states.logits(tokens.hidden_TPD[mine_N, last], last, distance)
        self.net.train(training)
        live = torch.stack([torch.ones_like(path_NDE), path_NDE, states_NDE], dim=-1)
        signal = torch.cat([live, given], dim=-1)
        trust_NDS = _STEEP * (self.trust_DS + self.trust_LS[layer_N][:, None] + context @ self.gate_GS)
        logit_NDE = (signal * trust_NDS[:, :, None]).sum(-1)
        chosen_NK = tokens.experts_TPK[torch.arange(len(layer_N), device=layer_N.device), layer_N]
        chosen_NE = torch.zeros_like(logit_NDE[:, 0]).scatter_(1, chosen_NK, 1.0)
        each_ND = F.binary_cross_entropy_with_logits(
            logit_NDE, chosen_NE[:, None].expand_as(logit_NDE), reduction="none"
        ).mean(-1)
        there_ND = from_ND >= 0
        return (each_ND * there_ND).sum() / there_ND.sum()

    def observe(self, event: GateEvent) -> None:
        if self.path is None:
            fitted = (self.trust_DS, self.trust_LS, self.gate_GS)
            trust_DS, trust_LS, gate_GS = (_STEEP * tensor.detach().numpy() for tensor in fitted)
            self.path = FusedPath(self.signals(with_net=True), trust_DS, trust_LS, gate_GS, self.options.haste)
        self.path.observe(event)

    def scores(self, layer: int) -> np.ndarray:
        assert self.path is not None, "nothing was observed"
        return self.path.logits(layer)
