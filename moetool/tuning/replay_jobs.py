"""A replay over several processes: each replays some policies, and progress counts the tokens of all."""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from moetool.base import plugins
from moetool.base.child_process import end_with_parent
from moetool.base.errors import MoetoolError
from moetool.base.tables import numbered
from moetool.caching.policy import policy_class
from moetool.trace.reader import Trace
from moetool.tuning.replay import SERVED, ReplayRow, ReplaySetup, ignore_progress, replay

_MOST_TASKS = 4096
_POLL_S = 0.2
_COMPILED = ("lru", "lfu", "lfru", "foresight")
_LEAST_EVENTS = 400_000
"""Events of all pools from which processes save more than the second that they take to start."""

_done: Any = None  # in a worker: replayed tokens of each task


def num_jobs(trace: Trace, policies: Sequence[str], budgets: Sequence[int], setup: ReplaySetup) -> int:
    """Return how many processes to use: `ReplaySetup.jobs`, but no more than there are pools to divide."""
    tasks = len(_tasks(policies, budgets, setup, 2))
    wanted = setup.jobs or len(os.sched_getaffinity(0))
    events = _tokens(trace, setup) * trace.spec.num_layers * len(policies) * len(budgets)
    return 1 if setup.jobs == 0 and events < _LEAST_EVENTS else min(wanted, max(tasks, 1))


def replay_with_jobs(
    trace: Trace, policies: Sequence[str], budgets: Sequence[int], setup: ReplaySetup
) -> list[ReplayRow]:
    """Like `replay`, in several processes (`ReplaySetup.jobs`); policies that use a predictor stay in this one.

    Effects: the processes stay for the next replay and end with this one.

    Raises:
        MoetoolError: a process has ended; else as `replay`.
    """
    processes = num_jobs(trace, policies, budgets, setup)
    if processes <= 1:
        return replay(trace, policies, budgets, setup)
    tasks = _tasks(policies, budgets, setup, processes)
    here = [name for name in dict.fromkeys(policies) if _stays(name, setup)]
    sent = replace(setup, predictor=None, trained_on=(), jobs=1, on_progress=ignore_progress)
    pool, done = _pool(processes)
    done[:] = [0] * len(done)
    trusted = frozenset(plugins.typed)
    futures = [pool.submit(_run, number, str(trace.path), *task, sent, trusted) for number, task in enumerate(tasks)]
    title = f"replaying {numbered(len(policies) * len(budgets), 'pool')} in {processes} processes (tokens)"
    total = _tokens(trace, setup) * (len(tasks) + bool(here))
    mine = 0

    def show(own: int) -> None:
        nonlocal mine
        mine = own
        setup.on_progress(title, min(sum(done[: len(tasks)]) + own, total), total)

    rows: dict[tuple[str, int], ReplayRow] = {}
    try:
        if here:
            found = replay(trace, here, budgets, replace(setup, on_progress=lambda _, own, __: show(own)))
            rows |= {(row.policy, row.budget_bytes): row for row in found}
        waiting: set[Future[list[ReplayRow]]] = set(futures)
        while waiting:
            finished, waiting = wait(waiting, timeout=_POLL_S)
            for future in finished:
                rows |= {(row.policy, row.budget_bytes): row for row in future.result()}
            show(mine)
    except BrokenProcessPool:
        _pool.cache_clear()
        raise MoetoolError("a process of the replay has ended; give it more memory, or replay with --jobs 1") from None
    finally:
        for future in futures:
            future.cancel()
    return [rows[name, budget] for name in policies for budget in budgets]


def _stays(name: str, setup: ReplaySetup) -> bool:
    return name == SERVED or (setup.predictor is not None and policy_class(name).uses(setup.predictor))


def _tasks(
    policies: Sequence[str], budgets: Sequence[int], setup: ReplaySetup, processes: int
) -> list[tuple[list[str], list[int]]]:
    """Split the pools: by policy if there are enough, since reading is shared; those that Python decides first."""
    sent = [name for name in dict.fromkeys(policies) if not _stays(name, setup)]
    sent.sort(key=lambda name: name in _COMPILED)
    if len(sent) >= 2 * processes:
        return [([name], list(budgets)) for name in sent]
    return [([name], [budget]) for name in sent for budget in dict.fromkeys(budgets)]


def _tokens(trace: Trace, setup: ReplaySetup) -> int:
    table = trace.requests
    counts = zip(table["request"].to_pylist(), table["tokens"].to_pylist(), strict=True)
    return sum(tokens for request, tokens in counts if setup.requests is None or request in setup.requests)


@cache
def _pool(processes: int) -> tuple[ProcessPoolExecutor, Any]:
    """Return persistent processes, and the replayed tokens of each of their tasks."""
    context = multiprocessing.get_context("forkserver")
    done = context.Array("q", _MOST_TASKS, lock=False)
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(done,)), done


def _begin(done: Any) -> None:
    """Prepare a worker: an interruption is the parent's."""
    global _done
    _done = done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


@lru_cache(1)
def _trace(path: str) -> Trace:
    return Trace(Path(path))


def _run(
    number: int,
    path: str,
    policies: list[str],
    budgets: list[int],
    setup: ReplaySetup,
    trusted: frozenset[tuple[str, str]],
) -> list[ReplayRow]:
    """Replay a task in a worker, with the plugins that its command line names. Raises: as `replay`."""
    plugins.typed.update(trusted)

    def report(what: str, done: int, total: int) -> None:
        _done[number % _MOST_TASKS] = done

    try:
        return replay(_trace(path), policies, budgets, replace(setup, on_progress=report))
    except MoetoolError:
        raise
    except Exception as error:  # the parent gets its traceback as text
        if (place := plugins.foreign_place(error)) is None:
            raise
        said = f"{type(error).__name__}: {error} (from {place}); MOETOOL_DEBUG=1 shows the traceback"
        raise MoetoolError(said) from error
