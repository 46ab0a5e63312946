"""Rollouts with routed experts at the top level, and rows that engines repeat or leave blank."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import MoetoolError
from moetool.trace.diff import diff
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests import foreign
from tests.foreign import HEADLESS, IDS, PROMPT, ROUTES, TOKENS, hidden_rows
from tests.refusals import refused


def rows_of(folder: Path) -> list[TokenBatch]:
    return list(Trace(folder).whole_requests())


def encoded(form: str, name: str) -> Any:
    rows = hidden_rows(name)
    if form == "list":
        return rows.tolist()
    if form == "npy":
        return foreign.npy(rows.astype(np.uint8))
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


@pytest.mark.parametrize("form", ["list", "npy", "int32"])
@pytest.mark.parametrize("last", [False, True])
def test_rollouts_of_every_encoding(tmp_path: Path, form: str, last: bool) -> None:
    lines = []
    for name in "ab":
        ids = {"prompt_ids": IDS[name][: PROMPT[name]], "response_ids": [*IDS[name][PROMPT[name] :], 99]}
        lines.append({"uid": name, "data_source": "law", **ids, "routed_experts": encoded(form, name)})
        if last and form == "list":  # a row for the last token too, which never ran
            lines[-1]["routed_experts"].append([[0, 0]] * 4)
    file = tmp_path / "f.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = import_trace([file], None, tmp_path / "t", settings=HEADLESS)
    assert made.format == "routed_experts_rows" and made.tasks == ["law"]
    for name, rows in zip("ab", rows_of(tmp_path / "t"), strict=True):
        assert (rows.experts_TS.reshape(ROUTES[name].shape) == ROUTES[name]).all()
        assert rows.token_id_T.tolist() == IDS[name]
        assert (rows.phase_T == 0).sum() == PROMPT[name]


def test_the_number_of_experts_is_the_highest_and_a_note_says_so(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text("".join(json.dumps({"routed_experts": hidden_rows(name).tolist()}) + "\n" for name in "ab"))
    made = import_trace([file], None, tmp_path / "t", settings={"first_k_dense": 1})
    most = max(int(rows.max()) for rows in ROUTES.values()) + 1
    assert Trace(tmp_path / "t").spec.num_experts == most
    assert [note for note in made.notes if "highest number" in note] == [
        f"{most} experts per layer, from the highest number in the file; --set num_experts tells more"
    ]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_token_ids_of_the_whole_text_begin_with_the_prompt(tmp_path: Path, last: bool, counted: bool) -> None:
    rows = hidden_rows("a").tolist() + [[[0, 0]] * 4] * last
    held = {"routed_experts": rows, "prompt_length": PROMPT["a"], "token_ids": [*IDS["a"], 99]}
    if counted:
        held["response_length"] = len(IDS["a"]) + 1 - PROMPT["a"]
    (tmp_path / "f.json").write_text(json.dumps(held))
    import_trace([tmp_path / "f.json"], None, tmp_path / "t", settings=HEADLESS)
    (found,) = rows_of(tmp_path / "t")
    assert found.token_id_T.tolist() == IDS["a"] and found.position_T.tolist() == list(range(TOKENS["a"]))
    assert (found.phase_T == 0).sum() == PROMPT["a"]


def test_token_ids_of_the_answer_follow_the_prompt(tmp_path: Path) -> None:
    new = [*IDS["a"][PROMPT["a"] :], 99]
    held = {"routed_experts": hidden_rows("a").tolist(), "prompt_length": PROMPT["a"], "token_ids": new}
    (tmp_path / "f.json").write_text(json.dumps(held))
    import_trace([tmp_path / "f.json"], None, tmp_path / "t", settings=HEADLESS)
    (found,) = rows_of(tmp_path / "t")
    assert (found.phase_T == 0).sum() == PROMPT["a"] and len(found) == TOKENS["a"]


def test_blank_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    rows: list[Any] = hidden_rows("a").tolist()
    rows[0], rows[2], rows[4] = None, [], [[-1, -1]] * 4
    file = tmp_path / "f.json"
    file.write_text(json.dumps({"routed_experts": rows, "prompt_tokens": 4}))
    made = import_trace([file], None, tmp_path / "t", settings=HEADLESS)
    (found,) = rows_of(tmp_path / "t")
    assert found.position_T.tolist() == [1, 3, 5, 6] and found.phase_T.tolist() == [0, 0, 1, 1]
    assert (found.experts_TS.reshape(-1, 3, 2) == ROUTES["a"][[1, 3, 5, 6]]).all()
    assert any(note.startswith("3 tokens") for note in made.notes)


def test_rows_of_a_reused_prefix_count_once(tmp_path: Path) -> None:
    """The second turn of a chat returns the routes of the first again."""
    first, second = (foreign.sglang_native(name) for name in "ab")
    whole = np.concatenate([hidden_rows("a"), hidden_rows("b")])
    second["meta_info"] |= {
        "prompt_tokens": TOKENS["a"] + PROMPT["b"],
        "cached_tokens": TOKENS["a"],
        "routed_experts": base64.b64encode(whole.astype("<i4").tobytes()).decode(),
    }
    file = tmp_path / "f.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (first, second)))
    made = import_trace([file], None, tmp_path / "t", settings=HEADLESS)
    assert made.tokens == TOKENS["a"] + TOKENS["b"]  # those that a forward ran
    assert any(note.startswith(f"{TOKENS['a']} rows") for note in made.notes)
    _, turn = rows_of(tmp_path / "t")
    assert (turn.experts_TS.reshape(-1, 3, 2) == ROUTES["b"]).all()
    assert turn.position_T.tolist() == list(range(7, 11)) and turn.phase_T.tolist() == [0, 0, 1, 1]


def test_routes_of_a_rollout_and_of_the_trainer_are_compared_by_layer(tmp_path: Path) -> None:
    """The trainer chose another expert for three of seven tokens in one layer, and for one in another."""
    trained = hidden_rows("a")
    for token, layer in ((1, 2), (3, 2), (6, 2), (5, 3)):
        free = next(expert for expert in range(8) if expert not in trained[token, layer])
        trained[token, layer, 1] = free
    ids = {"id": "x", "prompt_ids": IDS["a"][: PROMPT["a"]], "response_ids": [*IDS["a"][PROMPT["a"] :], 99]}
    for name, rows in (("rollout", hidden_rows("a")), ("trainer", trained)):
        (tmp_path / f"{name}.json").write_text(json.dumps({**ids, "routed_experts": rows.tolist()}))
        import_trace([tmp_path / f"{name}.json"], None, tmp_path / name, settings={**HEADLESS, "task": "rl"})
    found = diff(Trace(tmp_path / "rollout"), Trace(tmp_path / "trainer"))
    assert (found.tokens, found.left_out) == (7, 0)
    assert [layer.changed for layer in found.layers] == pytest.approx([0, 3 / 7, 1 / 7])
    assert found.equal_share == pytest.approx(1 - (3 / 7 + 1 / 7) / 3)


@pytest.mark.parametrize(
    "held",
    [
        {"routed_experts": None},
        {"routed_experts": []},
        {"routed_experts": [1, 2]},
        {"routed_experts": [[[1, 2]], [[1, 2], [3, 4]]]},
        {"routed_experts": [[[1, 1.5]] * 4]},
        {"routed_experts": [[[1, "x"]] * 4]},
        {"routed_experts": [[[0, 1]] * 3 + [[0, 300]]]},
        {"routed_experts": "AAAA"},
        {"routed_experts": {"a": 1}},
        {"routed_experts": [[[0, 0]] + [[1, 2]] * 3], "prompt_ids": [1, -2]},
        {"routed_experts": [[[0, 0]] + [[1, 2]] * 3], "prompt_tokens": 9},
    ],
)
def test_wrong_rollouts_are_refused_in_one_line(tmp_path: Path, held: dict[str, Any]) -> None:
    file = tmp_path / "f.json"
    file.write_text(json.dumps(held))
    with refused(MoetoolError, "f.json") as refusal:
        import_trace([file], "routed_experts_rows", tmp_path / "t", settings=HEADLESS)
    assert "\n" not in str(refusal.value) and not (tmp_path / "t").exists()
