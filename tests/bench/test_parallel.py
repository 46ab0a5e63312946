"""Expert parallelism on ranks of this machine: rows and bytes are asserted, seconds are printed.

python -m pytest tests/bench/test_parallel.py -m '' -s
"""

from pathlib import Path

import pytest

from moetool.bench.bench_result import show
from moetool.bench.expert_parallelism import RankBenchOptions, bench_parallel
from tests.ranks import ThreadRanks


@pytest.mark.slow
def test_proactive_is_evener_than_offline_than_reactive_than_vanilla(tmp_path: Path) -> None:
    """Migrations are always made here, so that no measured second decides what is counted."""
    options = RankBenchOptions(rounds=1, batches=4, expert_token_s=2e-5, link_bytes_s=200e6)
    lines = ["vanilla", "offline", "reactive-always", "stop", "overlap"]
    made = bench_parallel("reference", options, ThreadRanks(), tmp_path, only=lines, simulated=False)
    show(made)
    found = {row["name"]: row["rounds"][0] for row in made.rows}
    hottest = {name: run["hottest"] / run["rows"] for name, run in found.items()}
    assert hottest["overlap"] < hottest["offline"] < hottest["reactive-always"] < hottest["vanilla"]
    assert found["overlap"]["moved_bytes"] > 0
    assert found["overlap"]["during_exchange"] == found["stop"]["during_exchange"] == 0
