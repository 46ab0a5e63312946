"""`--set POLICY.OPTION` and `--set policy.OPTION` in `moetool replay` and `moetool serve`."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetool.base.config import parse_settings
from moetool.base.errors import UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import predictor_bytes
from moetool.runtime.automatic import choose
from moetool.training.predictor import build, save
from tests.command_line import Run
from tests.synthetic_routes import make_spec, write_trace

SPELLINGS = ("lfu.forget=true", "policy.forget=true")


def test_replay_takes_both_spellings(run: Run, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", make_spec(2), num_requests=8)
    given = ("replay", "--trace", tmp_path / "trace", "--budget", "50%", "--json")
    found = []
    for settings in ([], *(["--set", spelling] for spelling in SPELLINGS)):
        code, out, _ = run(*given, "--policy", "lfu", *settings)
        assert code == 0
        found.append(json.loads(out))
    assert found[0] != found[1] == found[2]
    code, _, err = run(*given, "--policy", "lfu,lru", "--set", SPELLINGS[1])
    assert code == 2 and "write POLICY.OPTION=VALUE" in err


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_serve_takes_both_spellings(spelling: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(_: Any, values: dict[str, Any], **__: Any) -> None:
        raise UsageError(f"chosen with {values['policy']}")

    monkeypatch.setattr("moetool.runtime.automatic.choose", choose)
    code, _, err = run("serve", "reference", "--policy", "lfu", "--set", spelling, "--port", "0")
    assert code == 2 and "chosen with {'forget': True}" in err


@pytest.mark.parametrize(("policy", "why"), [("lru", "uses lru"), ("auto", "chosen automatically")])
def test_serve_refuses_options_of_another_policy(policy: str, why: str, run: Run) -> None:
    code, _, err = run("serve", "reference", "--policy", policy, "--set", SPELLINGS[0], "--port", "0")
    assert code == 2 and why in err and err.strip().endswith("add --policy lfu")


def test_a_predictor_takes_memory_only_where_it_is_used(run: Run, tmp_path: Path) -> None:
    spec = Checkpoint.open("reference").spec
    predictor = build("expert_mlp", spec)  # 14.5 MB
    (tmp_path / "predictor").mkdir()
    facts = {"trace": {"sha256": "0" * 64}, "requests": {key: [] for key in ("train", "validation", "test")}}
    save(predictor, tmp_path / "predictor", {**facts, "seen_prompts": [], "fit": {}})
    for policy, takes in (("duoserve", predictor.num_bytes), ("lru", 0), ("foresight", 0)):
        assert predictor_bytes(policy, tmp_path / "predictor", None) == takes
    line = ("serve", "reference", "--device-memory", "14MB", "--policy", "duoserve", "--port", "0")
    code, _, err = run(*line, "--predictor", tmp_path / "predictor")
    assert code == 4 and "it needs at least 20.0 MB" in err and "predictor 14.5 MB" in err
    chosen = choose(
        Checkpoint.open("reference"),
        {"device": "cpu"},
        device_memory_bytes=28_000_000,
        predictor_bytes=predictor.num_bytes,
        policy="duoserve",
    )
    rows = {name: value for name, value, _ in chosen.choices}
    slots = int(rows["expert slots"].split()[0])
    assert slots * spec.slot_bytes < 28_000_000 - predictor.num_bytes and rows["predictor"] == "14.5 MB"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[on_demand,lru]", ["on_demand", "lru"]),
        ("['on_demand', lru]", "['on_demand', lru]"),  # half quoted: neither TOML nor a list of words
        ('["on_demand", "lru"]', ["on_demand", "lru"]),
        ("[ lru, 2, 0.5, true, 25%, a/b-c.jsonl ]", ["lru", 2, 0.5, True, "25%", "a/b-c.jsonl"]),
        ("[::1]", "[::1]"),
        ("lru", "lru"),
        ("[0.25,0.5]", [0.25, 0.5]),
        ("[lru,lfu,]", ["lru", "lfu"]),
        ("[lru,,lfu]", "[lru,,lfu]"),
    ],
)
def test_lists_take_names_without_quotes(text: str, value: object) -> None:
    assert parse_settings([f"bench.policies={text}"]) == {"bench": {"policies": value}}
