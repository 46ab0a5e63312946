"""The head's waiting and running requests, and their results."""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moetool.base.errors import MoetoolError
from moetool.placement.request_ranks import RankAssignment
from moetool.runtime.request import Output, SamplingParams, Sink, TokenLogprob

_RETRIES = 3


@dataclass(slots=True, kw_only=True)
class RankRequest:
    """A request for generation, or for the log-probabilities of a prompt.

    Attributes:
        id: the head's number; -1 until assigned.
        sink: receives the outputs of a request for generation.
        score: receives a prompt's log-probabilities, with the `top` most likely tokens.
        top: number of alternatives per token.
        made: tokens already sent to the client.
        gpu: the rank that it runs on, or is assigned to while waiting.
        retries: number of restarts.
        began: arrival time.
        cancelled: whether its rank was told to stop it.
    """

    id: int = -1
    prompt: list[int]
    params: SamplingParams
    sink: Sink | None = None
    score: "Future[list[TokenLogprob | None]] | None" = None
    top: int = 0
    made: list[int] = field(default_factory=list)
    gpu: int = -1
    retries: int = 0
    began: float = 0.0
    cancelled: bool = False


class Requests:
    """Waiting and running requests; for the head's thread.

    Attributes:
        pending: waiting requests in the order in which they will run.
        prompt: prompt tokens of requests that have begun, counted again for each retry.
        retried: restarts of requests.
    """

    def __init__(self) -> None:
        self.pending: deque[RankRequest] = deque()
        self.running: dict[int, RankRequest] = {}
        self.prompt = self.generated = self.retried = 0

    def admit(self, request: RankRequest) -> None:
        request.began = time.monotonic()
        if request.score is None and request.params.max_tokens == 0:
            self._give(request, Output(request.id, None, finish="length"))
        else:
            self.pending.append(request)

    def cancel(self, number: int) -> int | None:
        """Cancel a waiting request at once; of a running one, return the GPU that must stop it."""
        if number in self.running:
            self.running[number].cancelled = True
            return self.running[number].gpu
        for request in self.pending:
            if request.id == number:
                self.pending.remove(request)
                self._give(request, Output(number, None, finish="cancelled"))
                break
        return None

    def choose(
        self, seating: RankAssignment, members: Sequence[int], seats: int, *, keeps_running: bool = True
    ) -> list[RankRequest]:
        """Choose the waiting requests that join next, and set the GPU of each.

        Args:
            seats: seats per member.
            keeps_running: whether running requests keep their seats; otherwise all seats count as free.
        """
        taken = Counter(request.gpu for request in self.running.values()) if keeps_running else None
        dealt = seating.deal([request.id for request in self.pending], members, seats, taken)
        chosen = [request for request, _ in zip(self.pending, dealt, strict=False)]
        for request, gpu in zip(chosen, dealt, strict=True):
            request.gpu = gpu
        return chosen

    def begin(self, chosen: Sequence[RankRequest]) -> dict[int, list[dict[str, Any]]]:
        """Mark the chosen requests as running; return the messages to ranks, by GPU."""
        shares: dict[int, list[dict[str, Any]]] = {}
        for request in chosen:
            self.pending.popleft()
            self.running[request.id] = request
            one: dict[str, Any] = {"id": request.id, "prompt": [*request.prompt, *request.made]}
            if request.score is not None:
                one["top"] = request.top
            else:
                left = request.params.max_tokens - len(request.made)
                one["params"] = asdict(replace(request.params, max_tokens=left))
                one["drawn"] = request.params.drawn + len(request.made)
            self.prompt += len(request.prompt)
            shares.setdefault(request.gpu, []).append(one)
        return shares

    def begin_again(self) -> None:
        """Put running requests back at the front of the queue, because their batch was lost."""
        for request in sorted(self.running.values(), key=lambda r: r.id, reverse=True):
            if request.cancelled:  # its client is gone
                self._give(request, Output(request.id, None, finish="cancelled"))
                continue
            request.retries += 1
            self.retried += 1
            if request.retries > _RETRIES:
                self._refuse(request, f"ranks were lost {request.retries} times while this request ran; try it again")
            else:
                self.pending.appendleft(request)
        self.running.clear()

    def answer(self, said: Mapping[str, Any]) -> None:
        """Pass on a rank's message about a running request."""
        request = self.running.get(said["request"])
        if request is None:
            return
        if request.score is not None:
            del self.running[request.id]
            if "error" in said:
                request.score.set_exception(MoetoolError(said["error"]))
            elif "scored" in said:
                request.score.set_result([None, *(TokenLogprob(value, _pairs(top)) for value, top in said["scored"])])
            else:
                request.score.set_exception(MoetoolError("cancelled"))
            return
        logprob = said.get("logprob")
        if said["token"] is not None:
            request.made.append(said["token"])
            self.generated += 1
        output = Output(
            request.id,
            said["token"],
            None if logprob is None else TokenLogprob(logprob[0], _pairs(logprob[1])),
            said["finish"],
            said.get("error"),
        )
        self._give(request, output)

    def refuse_lost(self, held: Collection[int], reason: str) -> None:
        """End running requests with an error, except the numbers in `held`, which ranks still serve."""
        for request in [request for request in self.running.values() if request.id not in held]:
            self._refuse(request, reason)

    def refuse_all(self, others: Sequence[RankRequest], reason: str) -> None:
        """End all running and waiting requests with an error, and `others` that were not admitted."""
        self.refuse_lost((), reason)
        for request in (*self.pending, *others):
            self._refuse(request, reason)
        self.pending.clear()

    def _give(self, request: RankRequest, output: Output) -> None:
        if output.finish is not None:
            self.running.pop(request.id, None)
        if request.sink is not None:
            with contextlib.suppress(Exception):  # a failing sink must not affect other requests
                request.sink(output)

    def _refuse(self, request: RankRequest, reason: str) -> None:
        self.running.pop(request.id, None)
        if request.score is not None:
            request.score.set_exception(MoetoolError(reason))
        else:
            self._give(request, Output(request.id, None, finish="error", error=reason))


def _pairs(top: Sequence[Sequence[Any]]) -> list[tuple[int, float]]:
    return [(int(token), float(value)) for token, value in top]
