"""Replays over processes: the rows of one process, progress over all pools, and errors."""

import multiprocessing
import traceback
from pathlib import Path

import pytest

from moetool.base import plugins
from moetool.base.errors import CapacityError, MoetoolError
from moetool.tuning.replay import ReplaySetup, replay
from moetool.tuning.replay_jobs import num_jobs, replay_with_jobs
from tests.refusals import refused
from tests.synthetic import make_spec, write_trace


@pytest.mark.follows("moetool.tuning.replay_jobs replay_with_jobs")
def test_processes_make_the_rows_of_one_and_count_all_tokens(tmp_path: Path) -> None:
    trace, shown = write_trace(tmp_path / "t", make_spec(), num_requests=4), list[tuple[int, int]]()
    setup = ReplaySetup(jobs=2, on_progress=lambda what, done, total: shown.append((done, total)))
    policies, budgets = ["foresight", "lru", "belady", "lru"], [5000, 9000]
    assert replay_with_jobs(trace, policies, budgets, setup) == replay(trace, policies, budgets)
    assert shown[-1] == (trace.num_tokens * 6, trace.num_tokens * 6)  # one task per pool
    with refused(CapacityError, "1,999"):
        replay_with_jobs(trace, policies, [1999], setup)
    for process in multiprocessing.active_children():
        process.kill()
    with refused(MoetoolError, "--jobs 1"):
        replay_with_jobs(trace, policies, budgets, setup)
    assert replay_with_jobs(trace, policies, budgets, ReplaySetup(jobs=1)) == replay(trace, policies, budgets)
    assert replay_with_jobs(trace, policies, budgets, setup) == replay(trace, policies, budgets)


def test_a_policy_of_a_file_and_its_bug_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, setup = write_trace(tmp_path / "t", make_spec(), num_requests=4), ReplaySetup(jobs=2)
    own, broken = tmp_path / "own.py", tmp_path / "broken.py"
    code = "from moetool.caching.policies import lru\nOptions = lru.Options\n\n\nclass Policy(lru.Policy):\n"
    own.write_text(code + "    pass\n")
    broken.write_text(code + "    def gate(self, event, hits, misses):\n        return misses[0].nothing\n")
    monkeypatch.setattr(plugins, "typed", {("policy", str(own)), ("policy", str(broken))})
    rows = replay_with_jobs(trace, [str(own), "lru"], [5000, 9000], setup)
    assert [row.counts for row in rows[:2]] == [row.counts for row in rows[2:]]
    with refused(MoetoolError, "AttributeError", f"{broken}:7 in gate", "MOETOOL_DEBUG=1") as caught:
        replay_with_jobs(trace, [str(broken), "lru"], [5000, 9000], setup)
    assert "return misses[0].nothing" in "".join(traceback.format_exception(caught.value))


def test_a_small_replay_needs_no_processes(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", make_spec(), num_requests=4)
    assert num_jobs(trace, ["lru", "lfu"], [5000], ReplaySetup(jobs=0)) == 1
    assert num_jobs(trace, ["lru", "lfu"], [5000], ReplaySetup(jobs=7)) == 2
    assert num_jobs(trace, ["lru"], [5000], ReplaySetup(jobs=7)) == 1
