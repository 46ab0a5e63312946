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
    assert code == 0 and [row["misses"] for row in rows] == ["host", "own"], err
    assert rows[0]["hosted"] > 0 == rows[0]["missed"]
    for arguments, fact in (
        (("--machine", "pc-rtx-409"), "pc-rtx-4090-ddr5"),
        (("--machine", "laptop-16gb"), "GPU"),
        (("--machine", "h100", "--misses", "some"), "some"),
        (("--misses", "both"), "--machine"),
        (("--machine", "h100", "--profile", trace / "manifest.json"), "--profile"),
    ):
        code, _, err = run(*replay, *arguments)
        assert code == 2 and fact in err, err


def test_a_policy_that_places_misses_itself_has_one_row(run: Run, trace: Path) -> None:
    replay = ("replay", "--trace", trace, "--budget", "25%", "--machine", "pc-rtx-4090-ddr5")
    code, out, err = run(*replay, "--policy", "lru,static_split", "--misses", "host,both", "--json")
    found = [(row["policy"], row["misses"]) for row in json.loads(out)]
    assert code == 0 and found == [("lru", "host"), ("static_split", "own"), ("lru", "both")], err
    code, out, err = run(*replay, "--policy", "static_split", "--misses", "host")
    assert code == 2 and "--misses" in err and "static_split" in err and not out
    code, _, err = run(*replay, "--policy", "static_split", "--misses", "some")
    assert code == 2 and "some" in err


def test_options_without_effect_are_refused(run: Run, trace: Path) -> None:
    replay = ("replay", "--trace", trace, "--policy", "lru", "--budget", "25%", "--json")
    for order in ("sequential", "recorded"):
        code, _, err = run(*replay, "--order", order, "--set", "batching.order=experts")
        assert code == 2 and "batching" in err and f"--order {order}" in err
    by_value = ("--set", "lru.admit=value")
    code, _, err = run(*replay, *by_value)
    assert code == 2 and "admit" in err
    code, out, err = run(*replay, *by_value, "--machine", "pc-rtx-4090-ddr5")
    assert code == 0 and [row["misses"] for row in json.loads(out)] == ["load", "host", "both"], err


def test_misses_of_experts_on_disk_are_loaded(run: Run, trace: Path) -> None:
    replay = ("replay", "--trace", trace, "--policy", "lru", "--budget", "25%", "--json")
    on_disk = ("--machine", "pc-rtx-4090-ddr5", "--set", "timeline.tier=disk")
    code, _, err = run(*replay, *on_disk, "--misses", "load,both")
    assert code == 2 and "both" in err and "timeline.tier" in err
    code, out, err = run(*replay, *on_disk)
    (row,) = json.loads(out)
    assert code == 0 and row["misses"] == "load" and row["tpot_link_and_host_bound_s"] is None, err
