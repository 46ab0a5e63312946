"""The table of a replay: cells, and columns and marks that only some rows need."""

from dataclasses import replace

from moetool.caching.residency import Counts
from moetool.tuning.replay import ReplayRow
from moetool.tuning.replay_table import replay_table

ROW = ReplayRow(
    policy="lru",
    budget_bytes=2_000_000,
    slots=1_250,
    prefill=Counts(kept=1, missed=3),
    decode=Counts(kept=3, missed=1),
    decode_tokens=2,
    prefill_bytes=3_000_000,
    decode_bytes=1_000_000,
    decode_host_bytes=0,
    digest="",
)


def test_cells_have_counts_of_all_forwards_and_of_new_tokens() -> None:
    made = replay_table("", [ROW], whole_bytes=8_000_000)
    cells = dict(zip(made.columns, made.rows[0], strict=True))
    assert (cells["hit rate"], cells["in decode"], cells["slots"]) == ("0.500", "0.750", "1,250")
    assert "25 %" in cells["budget"] and cells["MB/decode token"] == "0.500"
    assert not {"MB on host/token", "TPOT ms"} & set(made.columns)


def test_experts_of_an_unknown_size_are_counted() -> None:
    row = replace(ROW, budget_bytes=3, decode_bytes=1, prefill_bytes=3)
    made = replay_table("", [row], whole_bytes=12, sized=False)
    cells = dict(zip(made.columns, made.rows[0], strict=True))
    assert (cells["budget"], cells["loads/decode token"]) == ("3 experts (25 %)", "0.5")
    assert not {"loaded", "MB/decode token"} & set(made.columns)
    made = replay_table("", [replace(row, decode_host_bytes=3)], sized=False)
    assert dict(zip(made.columns, made.rows[0], strict=True))["on host/token"] == "1.5" and "experts" in made.notes[-1]


def test_host_compute_has_a_column_if_a_row_has_some() -> None:
    made = replay_table("", [ROW, replace(ROW, decode_host_bytes=4_000_000)])
    at = made.columns.index("MB on host/token")
    assert [row[at] for row in made.rows] == ["0.000", "2.000"]


def test_chosen_rows_and_rows_of_known_requests_are_marked() -> None:
    other = replace(ROW, policy="foresight", trained_on=7)
    made = replay_table("", [ROW, other], chosen=[ROW])
    first, second = (row[0] for row in made.rows)
    assert "auto" in first and "auto" not in second and "7" in second
    assert any("trained on" in note for note in made.notes)
    assert not any("trained on" in note for note in replay_table("", [ROW]).notes)


def test_rows_of_split_misses_say_so() -> None:
    made = replay_table("", [ROW, replace(ROW, misses="both")])
    assert made.columns[1] == "misses" and [row[1] for row in made.rows] == ["load", "both"]
    assert "misses" not in replay_table("", [ROW]).columns
