"""A rank's share of a batch, served step by step with the other ranks."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from moetool.base.errors import first_line
from moetool.base.types import ModelSpec
from moetool.cluster.parallel.compute_windows import Windows
from moetool.cluster.parallel.dispatch import RankExperts
from moetool.cluster.parallel.expert_transfer import ExpertTransfer
from moetool.cluster.parallel.process_group import GroupBroken
from moetool.cluster.parallel.staged_migration import MigrationStage
from moetool.runtime.decoding import token_logprobs
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.own_caches import OwnCaches
from moetool.runtime.request import Output, SamplingParams

FOREVER = float("inf")
"""Seconds of a compute phase without a fixed end: it lasts until the next all-to-all."""
_POLL_S = 0.002
BATCH_STEPS = 128
"""Steps after which a batch ends, so that costs are measured and placements change under steady load."""


class Lockstep:
    """Serves batches together with the other ranks; for the rank's forward thread.

    Batching is continuous. Requests may join before any step (`join`) without the other ranks' knowledge. A batch is a
    run of steps: it ends when no rank has work, when the head has requests that begin under another placement,
    or after `BATCH_STEPS` steps. Unfinished requests continue in the next batch with their KV caches. Prefill is
    chunked.

    Each step begins with one small all-gather: whether a rank has work, the newest version whose experts have arrived,
    and whether the batch ends. So all ranks switch placements in the same step.

    Args:
        gpu: the rank's number in the cluster.
        say: sends a message of this generation to the head.
    """

    def __init__(
        self,
        spec: ModelSpec,
        gpu: int,
        experts: RankExperts,
        batcher: Batcher | OwnCaches,
        migration: ExpertTransfer,
        windows: Windows,
        say: Callable[[dict[str, Any]], None],
    ) -> None:
        self._spec, self._gpu, self._say = spec, gpu, say
        self._experts, self._batcher, self._migration, self._windows = experts, batcher, migration, windows
        self._cancelled: deque[int] = deque()
        self._joining: deque[dict[str, Any]] = deque()
        self._scores: deque[tuple[int, list[int], int]] = deque()
        self._ids: set[int] = set()
        self._stages: deque[MigrationStage] = deque()
        self._version = 0
        self._ended = -1  # the newest batch that the head asked to end
        self._moved = asdict(migration.moved)  # at the end of the last batch

    def cancel(self, request: int) -> None:
        """End a request before the next step; from any thread."""
        self._cancelled.append(request)

    def join(self, requests: Sequence[dict[str, Any]]) -> None:
        """Add requests from the next step on; from any thread."""
        self._joining.extend(requests)

    def end(self, batch: int) -> None:
        """End a batch after the current step, because requests join; from any thread."""
        self._ended = batch

    def follow(self, stages: Sequence[MigrationStage]) -> None:
        """Switch to these placements once their experts have arrived; from any thread."""
        for stage in stages:
            self._stages.append(stage)
            self._migration.ask(stage)

    def begin_anew(self, version: int) -> None:
        """Begin a generation with this version of the placement; drop running requests and pending stages."""
        for request in self._ids:
            self._batcher.cancel(request)
        self._ids.clear()
        self._joining.clear()
        self._scores.clear()
        self._cancelled.clear()
        self._stages.clear()
        self._version, self._ended = version, -1

    def serve(self, message: dict[str, Any]) -> None:
        """Serve one batch of joining and continuing requests. Raises: GroupBroken."""
        began = time.perf_counter()
        self._experts.count_anew()
        waited_s = self._windows.waited_s
        self.join(message["requests"])
        ready_s = self._reach(message["version"])
        while True:
            self._take_joining()
            self._end_cancelled()
            work = bool(self._scores) or not self._batcher.idle
            said = self._agree(work, self._ended >= message["batch"])
            self._switch(min(arrived for _, arrived, _ in said), False)
            steps = self._experts.tally.steps
            if not any(busy for busy, _, _ in said) or (steps and any(ends for _, _, ends in said)):
                break
            if steps == BATCH_STEPS:
                break
            self._experts.begin_step()
            outputs = self._forward() if work else []
            self._require_whole()
            self._experts.end_step()
            if outputs:
                self._say({"kind": "tokens", "outputs": outputs})
        self._windows.open(FOREVER)
        moved, self._moved = self._moved, asdict(self._migration.moved)
        tally = self._experts.tally
        self._say(
            {
                "kind": "done",
                "batch": message["batch"],
                "seconds": time.perf_counter() - began,
                "ready_s": ready_s,
                "waited_s": self._windows.waited_s - waited_s,
                "held": self._experts.buffers.most,
                "left": sorted(self._ids),
                "version": self._version,
                "tally": {**asdict(tally), "tokens_LE": tally.tokens_LE.tolist()},
                "moved": {name: value - moved[name] for name, value in self._moved.items()},
            }
        )

    def _take_joining(self) -> None:
        while self._joining:
            one = self._joining.popleft()
            if "top" in one:
                self._scores.append((one["id"], one["prompt"], one["top"]))
            else:
                self._batcher.add(one["id"], one["prompt"], SamplingParams(**one["params"]), one["drawn"])
            self._ids.add(one["id"])

    def _reach(self, version: int) -> float:
        """Wait until all ranks use the batch's first placement; return the seconds."""
        began = time.perf_counter()
        self._windows.open(FOREVER)
        while self._version < version:
            if self._migration.arrived < version:
                self._migration.wait(self._version + 1, _POLL_S)
            arrived = min(arrived for _, arrived, _ in self._agree(False, False))
            self._switch(min(arrived, version), True)
        return time.perf_counter() - began

    def _agree(self, work: bool, ends: bool) -> list[list[int]]:
        assert self._experts.group is not None
        self._migration.require_well()
        return self._experts.group.gather([work, self._migration.arrived, ends])

    def _switch(self, arrived: int, begins: bool) -> None:
        """Switch to the stages that have arrived at all ranks.

        Args:
            arrived: newest version whose experts all ranks have.
            begins: whether a batch begins.
        """
        while self._stages and self._stages[0].version <= arrived and (begins or not self._stages[0].at_batch):
            stage = self._stages.popleft()
            placed_GLE = self._experts.placed_GLE.copy()
            stage.apply(placed_GLE)
            self._experts.place(placed_GLE)
            for layer, expert, holders in stage.changes:
                if self._gpu not in holders:
                    self._experts.buffers.drop(self._spec.expert_key(layer, expert))
            self._version = stage.version
            self._migration.switched(stage.version)

    def _forward(self) -> list[dict[str, Any]]:
        if not self._scores:
            return [_message(output) for output in self._end(self._batcher.step())]
        request, prompt, top = self._scores.popleft()
        self._ids.discard(request)
        try:
            logprobs = token_logprobs(self._batcher.score(request, prompt), prompt, top)
        except GroupBroken:
            raise
        except Exception as error:
            return [{"request": request, "error": first_line(error)}]
        return [{"request": request, "scored": [[one.logprob, one.top] for one in logprobs if one is not None]}]

    def _end(self, outputs: list[Output]) -> list[Output]:
        self._ids -= {output.request for output in outputs if output.finish is not None}
        return outputs

    def _require_whole(self) -> None:
        """Raise a lost rank's error, which the batcher would attribute to its requests. Raises: GroupBroken."""
        group = self._experts.group
        if group is not None and group.broken is not None:
            raise GroupBroken(first_line(group.broken))

    def _end_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            self._take_joining()  # it may have joined just before
            if request in self._ids:
                self._ids.discard(request)
                self._batcher.cancel(request)
                self._scores = deque(score for score in self._scores if score[0] != request)
                ended = {"request": request, "token": None, "finish": "cancelled"}
                self._say({"kind": "tokens", "outputs": [ended]})


def _message(output: Output) -> dict[str, Any]:
    said: dict[str, Any] = {"request": output.request, "token": output.token, "finish": output.finish}
    if output.logprob is not None:
        said["logprob"] = [output.logprob.logprob, [list(pair) for pair in output.logprob.top]]
    if output.error is not None:
        said["error"] = output.error
    return said
