"""`moetool replay --machine`: times by vendors' figures, with misses on link and host."""

import json
from pathlib import Path

from tests.command_line import Run


def test_misses_on_link_and_host_of_a_named_machine(run: Run, trace: Path) -> None:
    replay = ("replay", "--trace", trace, "--policy", "lru,static_split", "--budget", "25%")
    code, out, err = run(*replay, "--machine", "pc-rtx-4090-ddr5")
    assert code == 0, err
    for word in ("misses", "load", "host", "both", "own", "link+host"):
        assert word in out
    code, out, err = run(*replay, "--machine", "pc-rtx-4090-ddr5", "--misses", "host", "--json")
    rows = json.loads(out)
    assert code == 0 and [row["misses"] for row in rows] == ["host"] and rows[0]["hosted"] > 0 == rows[0]["missed"], err
    for arguments, fact in (
        (("--machine", "pc-rtx-409"), "pc-rtx-4090-ddr5"),
        (("--machine", "laptop-16gb"), "GPU"),
        (("--machine", "h100", "--misses", "some"), "some"),
        (("--misses", "both"), "--machine"),
        (("--machine", "h100", "--profile", trace / "manifest.json"), "--profile"),
    ):
        code, _, err = run(*replay, *arguments)
        assert code == 2 and fact in err, err
