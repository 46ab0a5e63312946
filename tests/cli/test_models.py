"""`moetool models` says of every family whether and how it runs."""

import json

from moetool.base.families import FAMILIES
from moetool.models.tested_formats import UNLISTED
from tests.command_line import Run


def test_every_family_is_listed(run: Run) -> None:
    rows = {row["family"]: row for row in json.loads(run("models", "--json")[1])}
    assert rows.keys() == {*FAMILIES, *UNLISTED}
    assert {name for name, row in rows.items() if row["known"] == "inferred"} == set(UNLISTED)
    formats = rows["mixtral"].pop("formats")
    assert formats["gptq"] == formats["dense"] == "tested" and formats["mxfp4"] == "not tested"
    assert rows["mixtral"] == {
        "family": "mixtral",
        "known": "listed",
        "captured": True,
        "served": "in batches",
        "decoded": "program",
        "substitution": True,
        "weights": "softmax, summing to one",
        "remarks": "",
    }
    assert rows["jamba"]["served"] == "in batches" and "linear attention" in rows["jamba"]["remarks"]
    assert [rows[name]["decoded"] for name in ("gpt_oss", "jamba", "phimoe")] == ["program", "modules", "modules"]
    assert not rows["llama4_text"]["substitution"]
    assert rows["deepseek"]["served"] == "no" and "never runs code" in rows["deepseek"]["remarks"]
    for row in rows.values():
        assert row["remarks"] or (row["captured"] and row["served"] == "in batches" and row["substitution"])


def test_the_table_names_them_too(run: Run) -> None:
    code, out, err = run("models")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert all(any(line.split()[:1] == [name] for line in lines) for name in FAMILIES)


def test_code_of_checkpoints_cannot_be_asked_for(run: Run) -> None:
    code, _, err = run("capture", "reference", "--data", "all", "--out", "x", "--trust-remote-code")
    assert code == 2
    assert "no such option" in err and "--trust-remote-code" in err
