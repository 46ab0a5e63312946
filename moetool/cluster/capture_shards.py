"""Capture by several worker processes, which share whole batches: on this machine, or on the nodes of a Ray cluster.

The prompts' order fixes the batches in advance, and their rows do not depend on the node. A node takes one batch after
another. It writes them into the capture's stage where it sees that folder, else into one of its own, from which the
head fetches them. Another node takes up the batch of a lost one.
"""

import contextlib
import logging
import tempfile
import threading
import time
import uuid
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetool.base import durable, errors
from moetool.base.errors import MismatchError, MoetoolError
from moetool.base.json_files import read_json
from moetool.base.tables import numbered
from moetool.capture.automatic import CaptureMemory
from moetool.capture.batch_run import BatchRun, ExpertReads, progress_note
from moetool.capture.batch_writer import BatchWriter
from moetool.capture.job import CaptureOptions, CapturePlan, Item, machine_facts
from moetool.capture.resume import FACTS, CaptureFolder, difference, resumed_threads, stage_path
from moetool.capture.run import NEW_RUN, Captured, RunSetup, choose_run, enter_stage, finish, load, open_plan
from moetool.cluster.launch import ClusterAddress, Workers
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import use_threads
from moetool.prompts.gather import Prompt

_LOG = logging.getLogger(__name__)

USED_AT_START = ("moetool.runtime.assembly", "transformers.models.auto.modeling_auto")

_PIECE_BYTES = 2**26
_BATCH_S = 14 * 86_400.0  # a lost node is noticed by its connection
_TICK_S = 0.5


class CaptureNode:
    """Forwards batches of a capture in a process of its own.

    Args:
        out: the capture's output, by its name on the head's machine.
        facts: those of the head's plan.
        options: those of the head's plan, complete.
        memory: wishes for memory, with the composition.
        lengths: as of `moetool.capture.automatic.choose`.

    Effects: loads the model; starts a thread that writes.

    Raises:
        MismatchError: model, data type or versions differ from the head's.
    """

    def __init__(
        self,
        *,
        model: str,
        out: str,
        facts: Mapping[str, Any],
        options: CaptureOptions,
        memory: CaptureMemory,
        lengths: Sequence[tuple[int, int]],
    ) -> None:
        self._done_tokens = 0
        checkpoint = Checkpoint.open(model)
        options = replace(options, threads=use_threads(checkpoint.config, options.threads))
        chosen = choose_run(checkpoint, lengths, options, RunSetup(memory=memory))
        own = machine_facts(checkpoint, chosen.options, pooled=chosen.pooled)
        if differing := [name for name, value in own.items() if facts.get(name) != value]:
            changes = "; ".join(difference(name, facts.get(name), own[name]) for name in differing)
            raise MismatchError(f"{changes}; install the same versions, files and devices on all nodes")
        assert chosen.composition is not None
        plan = CapturePlan(
            checkpoint=checkpoint,
            options=chosen.options,
            batches=[[] for _ in chosen.composition.sizes],
            too_long=0,
            empty=0,
            facts=dict(facts),
            composition=chosen.composition,
        )
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if not _is_stage(stage_path(Path(out)), facts):
            self._folder = tempfile.TemporaryDirectory(prefix="moetool-capture-")
            out = f"{self._folder.name}/t"
            stage_path(Path(out)).mkdir()
        self._stage = CaptureFolder(Path(out), plan)
        self._writer = BatchWriter(self._stage).__enter__()
        self._run = BatchRun(load(plan, chosen.open_model), plan, self._writer, self._report)

    def forward(self, number: int, items: Sequence[tuple[Any, ...]]) -> tuple[str, str]:
        """Forward a batch and store its rows; returns kind and text of an error, or two empty strings."""
        batches = self._stage.plan.batches
        batches[number] = [Item(request, prompt, array("i", ids), *more) for request, prompt, ids, *more in items]
        try:
            self._run.batch(number)
            self._writer.flush()
        except MoetoolError as error:
            return type(error).__name__, str(error)
        except Exception as error:  # every node would fail on this batch, so this one must not seem lost
            _LOG.exception("batch %d failed", number)
            return "MoetoolError", f"batch {number}: {type(error).__name__}: {errors.first_line(error)}"
        finally:
            batches[number] = []
        return "", ""

    def read(self, number: int, offset: int) -> bytes:
        """Return the next piece of a finished batch; after the last one none, and the batch is removed."""
        path = self._stage.file(number)
        with path.open("rb") as file:
            file.seek(offset)
            piece = file.read(_PIECE_BYTES)
        if not piece:
            path.unlink()
        return piece

    def state(self) -> tuple[int, ExpertReads | None]:
        """Return the tokens done so far, and the reads."""
        return self._done_tokens, self._run.reads()

    def close(self) -> None:
        """Remove files; a forward may still run, and ends with the process."""
        if self._folder is not None:
            self._folder.cleanup()

    def _report(self, done: int, total: int, note: str) -> None:
        self._done_tokens = done


def capture_on_cluster(
    model: str,
    prompts: list[Prompt],
    out: Path,
    options: CaptureOptions,
    where: ClusterAddress,
    setup: RunSetup = NEW_RUN,
) -> Captured:
    """Capture with several processes; other arguments and errors are those of `capture`.

    Each uses one thread by default on this machine, since processes that compete for cores are slower. Device, data
    type and batches are chosen by this machine, where no option sets them.

    Args:
        where: processes on this machine, or a Ray head, whose nodes have one each.

    Effects: starts the processes, which end with this one.

    Raises:
        UsageError: Ray is not installed, or no head is at the address.
        MoetoolError: a batch failed, or no node is left.
    """
    began = time.perf_counter()
    if where.address is None:
        names = [f"worker {n}" for n in range(1, (where.count or 1) + 1)]
        options = resumed_threads(options, out, 1) if setup.resume else replace(options, threads=options.threads or 1)
        setup = replace(setup, memory=replace(setup.memory, processes=len(names), shards=len(names)))
    else:
        from moetool.cluster.ray_check import ask_head
        from moetool.cluster.ray_launch import require_ray

        require_ray()
        machines = ask_head(where.address).machines
        names = [machine.servers[0] if machine.servers else machine.address for machine in machines]
        setup = replace(setup, memory=replace(setup.memory, shards=len(names)))
    plan, chosen = open_plan(model, prompts, out, options, setup)
    memory = replace(setup.memory, composition=plan.composition)
    if where.address is None and chosen.setup is not None:
        memory = replace(chosen.setup.memory, composition=plan.composition)
    with enter_stage(plan, chosen, out, setup) as stage:
        missing = [] if stage.finished else stage.missing()
        if not missing:
            return finish(stage, setup.overwrite, began)
        arguments = {
            "model": model,
            "out": str(out.resolve()),
            "facts": plan.facts,
            "options": replace(plan.options, data=()),
            "memory": memory,
            "lengths": tuple((len(item.ids), item.full_tokens) for batch in plan.batches for item in batch),
        }
        names = names[: len(missing)]
        workers = Workers(
            where, CaptureNode, [arguments] * len(names), names, threads=plan.options.threads, late=where.count is None
        )
        with closing(workers):
            shards = _Shards(stage, workers, names, missing, setup)
            shards.run()
        return finish(stage, setup.overwrite, began, shards.reads)


class _Shards:
    """Batches of a capture, given to one node after another."""

    def __init__(
        self, stage: CaptureFolder, workers: Workers, names: Sequence[str], missing: Sequence[int], setup: RunSetup
    ) -> None:
        self._stage, self._workers, self._names, self._setup = stage, workers, names, setup
        self._left, self._running = deque(missing), set[int]()
        self._error: MoetoolError | None = None
        self._serving = {n for n in range(len(names)) if workers.is_started(n)}
        self._why = ""
        self._changed = threading.Condition()
        self._states: dict[int, tuple[int, ExpertReads | None]] = {}
        self._num_batches, self._num_tokens = [0] * len(names), [0] * len(names)  # of finished batches
        self._kept_tokens = stage.plan.num_tokens - stage.plan.tokens_of(missing)

    @property
    def reads(self) -> ExpertReads | None:
        """Reads of all nodes; None where every expert was in memory."""
        found = [reads for _, reads in self._states.values() if reads is not None]
        return ExpertReads.total(found) if found else None

    def run(self) -> None:
        """Have all batches forwarded. Raises: MoetoolError: a batch failed, or no node is left."""
        threads = [threading.Thread(target=self._serve, args=(n,), daemon=True) for n in self._serving]
        for thread in threads:
            thread.start()
        began = time.perf_counter()
        while any(thread.is_alive() for thread in threads) and self._error is None:
            with self._changed:
                self._changed.wait(_TICK_S)
            self._report(began)
        if self._error is not None:
            raise self._error
        if self._left:
            raise MoetoolError(f"no node is left to capture: {self._why}")
        for n, (_, reads) in sorted(self._states.items()):
            said = numbered(self._num_batches[n], "batch", "batches")
            self._setup.on_note(f"{self._names[n]}: {said}" + ("" if reads is None else f", {reads.describe()}"))

    def _serve(self, n: int) -> None:
        """Give batches to a node until all are finished or it is lost."""
        while (number := self._next()) is not None:
            lost, failed = "", None
            try:
                failed = self._forward(n, number)
            except MoetoolError as error:  # of the process or the connection
                lost = str(error)
            except OSError as error:  # of the stage's disk
                failed = MoetoolError(f"{self._stage.path}: {errors.first_line(error)}")
            except Exception as error:
                _LOG.exception("batch %d failed", number)
                failed = MoetoolError(f"batch {number}: {type(error).__name__}: {errors.first_line(error)}")
            finally:
                self._end(n, number, lost, failed)
            if lost:
                return

    def _forward(self, n: int, number: int) -> MoetoolError | None:
        """Have a node finish a batch; returns why the batch failed. Raises: MoetoolError: the node is lost."""
        kind, text = self._workers.call(n, "forward", number, self._items(number), timeout_s=_BATCH_S)
        if kind:
            return getattr(errors, kind, MoetoolError)(text)
        if not self._stage.file(number).exists():
            self._fetch(n, number)
        with contextlib.suppress(MoetoolError):  # the batch is finished: a node that is lost by now fails the next one
            self._ask(n)
        return None

    def _end(self, n: int, number: int, lost: str, failed: MoetoolError | None) -> None:
        """Count a batch, or return that of a lost node."""
        with self._changed:
            self._running.discard(number)
            self._error = self._error or failed
            self._why = lost or self._why
            if self._stage.file(number).exists():
                self._num_batches[n] += 1
                self._num_tokens[n] += self._stage.plan.tokens_of([number])
            elif lost:
                self._left.appendleft(number)
            if lost:
                self._serving.discard(n)
                if n in self._states:  # another node forwards the unfinished batch again
                    self._states[n] = (self._num_tokens[n], self._states[n][1])
            note = f"{lost}; the others take up its batch" if self._left and self._serving else lost
            self._changed.notify_all()
        if lost:
            _LOG.warning("node %s is lost: %s", self._names[n], lost)
            self._setup.on_note(note)

    def _next(self) -> int | None:
        """Take the next batch; wait while others may come back; None at the end."""
        with self._changed:
            while not self._left and self._running and self._error is None:
                self._changed.wait()
            if self._error is not None or not self._left:
                return None
            number = self._left.popleft()
            self._running.add(number)
            return number

    def _items(self, number: int) -> list[tuple[Any, ...]]:
        """Return the batch's items without texts, which its rows do not need."""
        return [
            (item.request, replace(item.prompt, text="", messages=(), answer=None), list(item.ids), *item[3:])
            for item in self._stage.plan.batches[number]
        ]

    def _fetch(self, n: int, number: int) -> None:
        """Copy a batch from a node that does not see the stage."""
        path, offset = self._stage.path / f"{uuid.uuid4().hex}{durable.PARTIAL}", 0
        try:
            with path.open("wb") as file:
                while piece := self._workers.call(n, "read", number, offset, timeout_s=_BATCH_S):
                    offset += file.write(piece)
            durable.sync(path)
            path.rename(self._stage.file(number))
        finally:
            path.unlink(missing_ok=True)

    def _ask(self, n: int, timeout_s: float = 60.0) -> None:
        """Ask a node how far it is; of two answers the later one counts."""
        state = self._workers.call(n, "state", timeout_s=timeout_s)
        with self._changed:
            if n in self._serving:
                self._states[n] = max(state, self._states.get(n, state), key=lambda one: one[0])

    def _report(self, began: float) -> None:
        """Ask the nodes how far they are, and report it."""
        if self._setup.on_progress is None:
            return
        for n in sorted(self._serving):
            with contextlib.suppress(MoetoolError):
                self._ask(n, _TICK_S)
        done = sum(tokens for tokens, _ in self._states.values())
        note = progress_note(done, time.perf_counter() - began, self.reads)
        self._setup.on_progress(self._kept_tokens + done, self._stage.plan.num_tokens, note)


def _is_stage(path: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a folder is the stage of the capture with these facts."""
    try:
        found: bool = read_json(path / FACTS, advice="") == facts
    except (OSError, MismatchError):
        return False
    return found
