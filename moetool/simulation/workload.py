"""Routing of simulated requests: rows of real traces."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from moetool.base.errors import UsageError
from moetool.base.types import Cluster, ModelSpec, Phase
from moetool.simulation.arrivals import Arrival
from moetool.trace.expert_counts import count_experts
from moetool.trace.reader import Trace

Step = tuple[tuple[int, int], ...]
"""One MoE layer of one forward: (expert, its tokens), by expert."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """The routing of a request.

    Attributes:
        reply_TS: routes of its new tokens, each one forward.
        token_id_T: prompt tokens, the only known data of a waiting request; empty for synthetic routes.
    """

    spec: ModelSpec
    prompt_TS: np.ndarray
    reply_TS: np.ndarray
    token_id_T: np.ndarray

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_TS)

    @property
    def new_tokens(self) -> int:
        """Return the number of forwards after the prompt's."""
        return len(self.reply_TS)

    @cached_property
    def calls_LE(self) -> np.ndarray:
        """Expert calls of all tokens."""
        return count_experts(self.spec, np.concatenate([self.prompt_TS, self.reply_TS]))

    @cached_property
    def steps(self) -> list[Step]:
        """Layers of all forwards in order, for the event loop: the prompt is one forward, each new token another."""
        start_L = np.concatenate([[0], np.cumsum(self.spec.top_k_L)]).tolist()
        spans = [slice(a, b) for a, b in pairwise(start_L)]
        steps: list[Step] = []
        for span in spans:
            experts, tokens = np.unique(self.prompt_TS[:, span], return_counts=True)
            steps.append(tuple(zip(experts.tolist(), tokens.tolist(), strict=True)))
        for row in self.reply_TS.tolist():
            steps += [tuple((expert, 1) for expert in sorted(row[span])) for span in spans]
        return steps


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedRequest:
    """State of a request in the simulated cluster.

    Attributes:
        number: number by arrival.
        gpu: GPU of its dense layers, where its tokens start.
        arrived_s: time of arrival.
        started_s: time of its start; -1 before.
        first_s: end of its prompt; -1 before.
        finished_s: end of its last token; -1 before.
        step: index of the next of `route.steps`.
        pending: messages of this step whose results have not joined the link back.
        left: departure of the last other result, arrival of its message, and the message's number.
        back_s: arrival of the latest returned result.
    """

    number: int
    gpu: int
    route: Route
    arrived_s: float
    started_s: float = -1.0
    first_s: float = -1.0
    finished_s: float = -1.0
    step: int = 0
    pending: int = 0
    left: tuple[float, float, int] = (0.0, 0.0, 0)
    back_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSource:
    """The requests of a server's trace for drawing.

    Attributes:
        prompts: routes [T, S] of each request's prompt.
        replies: routes of its new tokens.
        token_ids: tokens of its prompt.
    """

    prompts: list[np.ndarray]
    replies: list[np.ndarray]
    token_ids: list[np.ndarray]


def read_source(
    trace: Trace,
    uses: Callable[[int], bool],
    prompt_tokens: int = 0,
    decode_tokens: int = 20,
    among: Collection[int] | None = None,
) -> RequestSource:
    """Read a trace's requests.

    A request with a prompt only (teacher-forced routes) is split. Its first `prompt_tokens` tokens, or all but the last
    `decode_tokens`, are the prompt; the others count as decoded.

    Args:
        uses: whether to use a request, by its index in the trace.
        prompt_tokens: maximum length of a prompt (0: no limit).
        decode_tokens: maximum number of new tokens.
        among: requests that may be used (default: all).

    Raises:
        UsageError: no request with tokens is left.
    """
    wanted = {request for place, request in enumerate(trace.requests["request"].to_pylist()) if uses(place)}
    if among is not None:
        wanted &= set(among)
    rows: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for batch in trace.batches():
        for request in np.unique(batch.request_T).tolist():
            if request in wanted:
                mine = batch.request_T == request
                rows.setdefault(request, []).append(
                    (batch.phase_T[mine], batch.experts_TS[mine], batch.token_id_T[mine])
                )
    prompts, replies, token_ids = [], [], []
    for request in sorted(rows):
        phase_T, experts_TS, token_id_T = map(np.concatenate, zip(*rows[request], strict=True))
        prompt_TS, reply_TS = experts_TS[phase_T == Phase.PREFILL], experts_TS[phase_T == Phase.DECODE]
        if not len(reply_TS):
            cut = prompt_tokens or max(len(prompt_TS) - decode_tokens, (len(prompt_TS) + 1) // 2)
            prompt_TS, reply_TS = prompt_TS[:cut], prompt_TS[cut:]
        elif not len(prompt_TS):
            prompt_TS = reply_TS[:1]
        prompts.append(prompt_TS[: prompt_tokens or None])
        prompt_id_T = token_id_T[phase_T == Phase.PREFILL] if Phase.PREFILL in phase_T else token_id_T
        token_ids.append(prompt_id_T[: len(prompts[-1])])
        replies.append(reply_TS[:decode_tokens] if len(reply_TS) else prompt_TS[-1:])
    if not prompts:
        seen = "" if among is None else " that the predictor was not trained on"
        raise UsageError(f"{trace.path} has no request left to draw{seen}; give a longer trace or another --set split")
    return RequestSource(prompts=prompts, replies=replies, token_ids=token_ids)


def draw_requests(
    spec: ModelSpec,
    cluster: Cluster,
    sources: Mapping[int, RequestSource],
    arrivals: Sequence[Arrival],
    rng: np.random.Generator,
    *,
    decode_tokens: int = 20,
    most_tokens: int = 0,
    first_number: int = 0,
) -> list[SimulatedRequest]:
    """Draw a request for each arrival, with replacement from its server's source; its GPUs take turns.

    If an arrival has lengths, the drawn request's rows are repeated or cut to these lengths.

    Args:
        decode_tokens: maximum number of new tokens, also for arrivals with lengths.
        most_tokens: maximum length of a prompt, also for arrivals with lengths (0: no limit).
        first_number: number of the first request.
    """
    first = np.concatenate([[0], np.cumsum([len(server.gpus) for server in cluster.servers])]).tolist()
    turn = [0] * len(cluster.servers)
    known: dict[tuple[int, int, int, int], Route] = {}
    requests = []
    for number, arrival in enumerate(arrivals, first_number):
        n = arrival.server
        source = sources[n]
        pick = int(rng.integers(len(source.prompts)))
        prompt_TS, reply_TS = source.prompts[pick], source.replies[pick]
        prompt = len(prompt_TS) if arrival.prompt_tokens is None else arrival.prompt_tokens
        prompt = min(prompt, most_tokens) if most_tokens else prompt
        new = min(len(reply_TS) if arrival.new_tokens is None else arrival.new_tokens, decode_tokens)
        # Servers that share a source share its routes.
        key = (id(source), pick, prompt, new)
        if key not in known:
            known[key] = Route(
                spec=spec,
                prompt_TS=_repeated(prompt_TS, prompt),
                reply_TS=_repeated(reply_TS, new),
                token_id_T=_repeated(source.token_ids[pick], prompt),
            )
        gpu = first[n] + turn[n] % len(cluster.servers[n].gpus)
        turn[n] += 1
        requests.append(SimulatedRequest(number=number, gpu=gpu, route=known[key], arrived_s=arrival.at_s))
    return requests


def _repeated(rows_TS: np.ndarray, length: int) -> np.ndarray:
    return rows_TS[np.arange(length) % len(rows_TS)]
