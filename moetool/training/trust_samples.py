"""Signals of the tokens that fit the trust, computed once for all epochs.

`moetool.prediction.path_signals` replays the requests that fit the trust (judged requests). The values of its tables
and memories are stored for each layer and distance, so that fitting (`predictors/fused.py`) does not replay again.
"""

import numpy as np
import torch
from torch import Tensor

from moetool.base.types import ForwardInfo, GateEvent
from moetool.prediction.path_signals import CONTEXT, GIVEN, SIGNALS, PathSignals
from moetool.prediction.path_trust import DISTANCES
from moetool.prediction.route_memory import EVERYONE, NOBODY
from moetool.training.tokens import Tokens

_JUDGED_BYTES = 96 << 20  # limit of stored signals


class TrustSamples:
    """Tokens of whole requests in order, and the signals of judged ones.

    Args:
        signals: signals without networks, from all counts.
        source_C: request of each path in the signals' memory; a judged request does not see its own paths.
        ordered: tokens without hidden states.
        judged: requests that fit the trust.
        learns: whether networks may learn from the other requests.
        hidden: hidden states, possibly in a file and in another order, and the row of each token in them.

    Shapes: before_N int64, the request's previous token with a known path, or -1; judged_N int64, the row J of a judged
    token, or -1; signals_JLDES and context_JLDG float16, for layer L from D layers before.
    """

    def __init__(
        self,
        signals: PathSignals,
        source_C: np.ndarray,
        ordered: Tokens,
        judged: list[int],
        *,
        learns: bool,
        hidden: tuple[Tensor, Tensor] | None,
    ) -> None:
        assert ordered.request_T is not None and ordered.iteration_T is not None
        self.learns = learns
        self._hidden = hidden
        self._experts_NLK, self._num_experts = ordered.experts_TPK, signals.num_experts
        request_N, iteration_N = ordered.request_T.numpy(), ordered.iteration_T.numpy()
        index_N = np.arange(len(request_N))
        begins_N = np.ones(len(request_N), bool)
        begins_N[1:] = (request_N[1:] != request_N[:-1]) | (iteration_N[1:] != iteration_N[:-1])
        last_N = np.maximum.accumulate(np.where(begins_N, index_N, 0)) - 1
        same_N = (last_N >= 0) & (request_N[last_N] == request_N)
        self.before_N = torch.from_numpy(np.where(same_N, last_N, -1))
        L, E, S = signals.num_layers, signals.num_experts, len(SIGNALS) - GIVEN
        of_judged = np.flatnonzero(np.isin(request_N, judged))
        capacity = max(64, _JUDGED_BYTES // (2 * L * len(DISTANCES) * E * S))
        chosen = of_judged[:: -(-len(of_judged) // capacity)]
        self.judged_N = torch.full((len(request_N),), -1)
        self.judged_N[chosen] = torch.arange(len(chosen))
        self.signals_JLDES = torch.zeros(len(chosen), L, len(DISTANCES), E, S, dtype=torch.float16)
        self.context_JLDG = torch.zeros(len(chosen), L, len(DISTANCES), CONTEXT, dtype=torch.float16)
        ends = np.append(np.flatnonzero(begins_N)[1:], len(request_N))
        for request in judged:
            learned_C = signals.memory.owner_C[: signals.memory.num_learned]
            learned_C[:] = np.where(source_C == request, NOBODY, EVERYONE)
            signals.memory.forget()
            signals.running.clear()
            for start, end in zip(np.flatnonzero(begins_N).tolist(), ends.tolist(), strict=True):
                if request_N[start] == request:
                    self._watch(signals, ordered.take(slice(start, end)), start)

    def __len__(self) -> int:
        return len(self.before_N)

    def hidden(self, token_N: Tensor) -> Tensor:
        """Return hidden_NPD of these tokens, float32."""
        assert self._hidden is not None
        hidden_TPD, row_T = self._hidden
        return hidden_TPD[row_T[token_N]].float()

    def before(self, token_N: Tensor) -> Tensor:
        """Return before_NLE: the experts of the request's last token; 0 without one."""
        last_N = self.before_N[token_N]
        num_layers = self._experts_NLK.shape[1]
        used_NLE = torch.zeros(len(token_N), num_layers, self._num_experts)
        used_NLE.scatter_(2, self._experts_NLK[last_N.clamp(min=0)], 1.0)
        return used_NLE * (last_N >= 0)[:, None, None]

    def _watch(self, signals: PathSignals, tokens: Tokens, start: int) -> None:
        """Let the signals observe one forward, and store their values for judged tokens."""
        assert tokens.request_T is not None and tokens.weights_TPK is not None
        num_tokens, num_layers, _ = tokens.experts_TPK.shape
        request = int(tokens.request_T[0])
        info = ForwardInfo(
            forward_id=0, request_T=(request,) * num_tokens, phase_T=(0,) * num_tokens, position_T=(1,) * num_tokens
        )
        row_T = self.judged_N[start : start + num_tokens]
        mine_T = row_T >= 0
        for layer in range(num_layers):
            experts_TK = tuple(map(tuple, tokens.experts_TPK[:, layer].tolist()))
            ahead_ATE = None
            if tokens.ahead_TPAE is not None:
                ahead_ATE = tokens.ahead_TPAE[:, layer, : num_layers - 1 - layer].transpose(0, 1).numpy()
            weights_TK = tokens.weights_TPK[:, layer].numpy()
            signals.observe(
                GateEvent(forward=info, layer=layer, experts_TK=experts_TK, weights_TK=weights_TK, ahead_ATE=ahead_ATE)
            )
            if not bool(mine_T.any()):
                continue
            for index, distance in enumerate(DISTANCES):
                if (coming := layer + distance) < num_layers:
                    f_TES, context_TG = signals.signals(coming)
                    self.signals_JLDES[row_T[mine_T], coming, index] = torch.from_numpy(f_TES)[mine_T, :, GIVEN:].half()
                    self.context_JLDG[row_T[mine_T], coming, index] = torch.from_numpy(context_TG)[mine_T].half()
