"""`moetool models` says of every family whether and how it runs."""

import json
import subprocess
import sys

from moetool.models.families import FAMILIES


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moetool.cli.main", *args], capture_output=True, text=True, check=False
    )


def test_every_family_is_listed() -> None:
    rows = {row["family"]: row for row in json.loads(_run("models", "--json").stdout)}
    assert rows.keys() == FAMILIES.keys()
    assert rows["mixtral"] == {
        "family": "mixtral",
        "captured": True,
        "served": "in batches",
        "substitution": True,
        "weights": "softmax, summing to one",
        "remarks": "",
    }
    assert rows["jamba"]["served"] == "one at a time" and "linear attention" in rows["jamba"]["remarks"]
    assert not rows["llama4_text"]["substitution"]
    assert rows["deepseek"]["served"] == "no" and "never runs the code" in rows["deepseek"]["remarks"]
    for row in rows.values():
        assert row["remarks"] or (row["captured"] and row["served"] == "in batches" and row["substitution"])


def test_the_table_names_them_too() -> None:
    found = _run("models")
    assert found.returncode == 0 and found.stderr == ""
    lines = found.stdout.splitlines()
    assert all(any(line.split()[:1] == [name] for line in lines) for name in FAMILIES)


def test_code_of_checkpoints_cannot_be_asked_for() -> None:
    found = _run("capture", "reference", "--data", "all", "--out", "x", "--trust-remote-code")
    assert found.returncode == 2
    assert "no such option" in found.stderr and "--trust-remote-code" in found.stderr
