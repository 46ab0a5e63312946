"""Counts over time and wide tables."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetool.base.errors import MoetoolError
from moetool.trace.expert_counts import ExpertCounts
from moetool.trace.foreign.importing import import_trace
from tests.published_routes import SHARED
from tests.refusals import refused

OLMOE = SHARED / "data" / "counts" / "olmoe"
COUNTS = np.random.default_rng(3).integers(1, 9, (2, 3, 4))  # times, layers, experts


def test_each_time_is_a_pass(tmp_path: Path) -> None:
    rows = ["time,layer,expert,count"]
    rows += [f"{0.5 * t},{i + 1},{e},{COUNTS[t, i, e]}" for (t, i, e), _ in np.ndenumerate(COUNTS)]
    (tmp_path / "f.csv").write_text("\n".join(rows) + "\n")
    made = import_trace([tmp_path / "f.csv"], None, tmp_path / "t")
    assert (made.format, made.requests) == ("column_counts", 2)
    found = ExpertCounts(tmp_path / "t")
    assert (found.counts_WLE == COUNTS).all() and found.spec.layer_ids_L == (1, 2, 3)
    # the size of an expert is not in the file, and top-k neither
    assert found.num_tokens == COUNTS.sum() / 3
    (tmp_path / "f.csv").write_text("\n".join([rows[0].replace("time", "hour"), *reversed(rows[1:])]) + "\n")
    import_trace([tmp_path / "f.csv"], None, tmp_path / "s")
    assert (ExpertCounts(tmp_path / "s").counts_WLE == COUNTS).all()  # by time, not by the order of rows
    with refused(MoetoolError, "twice"):
        (tmp_path / "f.csv").write_text("\n".join([*rows, rows[1]]) + "\n")
        import_trace([tmp_path / "f.csv"], None, tmp_path / "u")


def layer_files(folder: Path, times: int = 1) -> list[Path]:
    """A file for each layer, with its experts' counts."""
    files = [folder / f"counts.layer_{i + 1}.csv" for i in range(3)]
    for i, file in enumerate(files):
        rows = [f"{t},{e},{COUNTS[t, i, e]}" for t in range(times) for e in range(4)]
        file.write_text("\n".join(["time,expert,count", *rows]) + "\n")
    return files


@pytest.mark.parametrize("times", [1, 2])
def test_a_file_for_each_layer(tmp_path: Path, times: int) -> None:
    made = import_trace(layer_files(tmp_path, times), None, tmp_path / "t")
    found = ExpertCounts(tmp_path / "t")
    assert (found.counts_WLE == COUNTS[:times]).all() and found.spec.layer_ids_L == (1, 2, 3)
    assert made.requests == times


def test_files_of_layers_that_do_not_go_together(tmp_path: Path) -> None:
    files = layer_files(tmp_path, 2)
    (tmp_path / "other").mkdir()
    twice = layer_files(tmp_path / "other", 2)[0]
    with refused(MoetoolError, files[0].name, "twice"):
        import_trace([*files, twice], None, tmp_path / "t")
    short = layer_files(tmp_path / "other", 1)
    with refused(MoetoolError, files[0].name, "unequal"):
        import_trace([files[0], short[1]], None, tmp_path / "t")
    later = files[1].read_text().replace("\n1,", "\n2,")
    (tmp_path / "other" / files[1].name).write_text(later)
    with refused(MoetoolError, files[0].name, "unequal"):  # times 0 and 1, and 0 and 2
        import_trace([files[0], tmp_path / "other" / files[1].name], None, tmp_path / "t")
    unnamed = files[0].rename(tmp_path / "counts.csv")
    with refused(MoetoolError, unnamed.name, "layer"):
        import_trace([unnamed], "column_counts", tmp_path / "t")


def test_a_time_of_two_columns_and_an_empty_expert(tmp_path: Path) -> None:
    file = tmp_path / "f.csv"
    file.write_text("date,hour,layer,expert,count\n" + "".join(f"2026-01-01,{hour},0,0,3\n" for hour in (0, 1)))
    with refused(MoetoolError, file, "date", "hour", "--map"):
        import_trace([file], None, tmp_path / "t")
    for row in ("0,,3", ",1,3", "0,1,"):
        file.write_text(f"layer,expert,count\n0,0,5\n{row}\n")
        with refused(MoetoolError, file, "empty"):
            import_trace([file], None, tmp_path / "t")


def layer_rows() -> list[dict[str, int]]:
    return [{"layer": i + 1, **{f"expert_{e}": int(COUNTS[0, i, e]) for e in range(4)}} for i in range(3)]


def expert_rows() -> list[dict[str, int]]:
    return [{"expert": e, **{f"layer_{i + 1}": int(COUNTS[0, i, e]) for i in range(3)}} for e in range(4)]


def plain_rows() -> list[dict[str, int]]:
    return [{"Layer": i + 1, **{str(e): int(COUNTS[0, i, e]) for e in range(4)}} for i in range(3)]


@pytest.mark.parametrize("rows", [layer_rows, expert_rows, plain_rows])
@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet"])
def test_wide_tables_of_both_directions(tmp_path: Path, rows, form: str) -> None:  # type: ignore[no-untyped-def]
    held, file = rows(), tmp_path / f"f.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(held), file)
    elif form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in held))
    else:
        separator = "," if form == "csv" else "\t"
        lines = [list(held[0]), *(row.values() for row in held)]
        file.write_text("".join(separator.join(map(str, line)) + "\n" for line in lines))
    made = import_trace([file], None, tmp_path / "t")
    assert made.format == "wide_counts"
    found = ExpertCounts(tmp_path / "t")
    assert (found.counts_WLE == COUNTS[:1]).all() and found.spec.layer_ids_L == (1, 2, 3)


def test_wide_tables_over_time(tmp_path: Path) -> None:
    rows = ["step,layer,0,1,2,3"]
    rows += [f"{t * 100},{i + 1},{','.join(map(str, COUNTS[t, i]))}" for t in range(2) for i in range(3)]
    (tmp_path / "f.csv").write_text("\n".join(rows) + "\n")
    import_trace([tmp_path / "f.csv"], None, tmp_path / "t")
    assert (ExpertCounts(tmp_path / "t").counts_WLE == COUNTS).all()


@pytest.mark.skipif(not OLMOE.is_dir(), reason="shared/data/counts is not here")
def test_published_counts_arrive_by_their_names_alone(tmp_path: Path) -> None:
    files = sorted(OLMOE.glob("*.csv"))
    assert len(files) == 13
    for file in files:
        import_trace([file], None, tmp_path / file.stem)
        found = ExpertCounts(tmp_path / file.stem)
        with file.open(newline="") as text:
            rows = [tuple(map(int, row.values())) for row in csv.DictReader(text)]
        assert found.spec.layer_ids_L == tuple(sorted({layer for layer, _, _ in rows}))
        assert len(rows) == found.counts_WLE.size
        for layer, expert, count in rows:
            assert found.counts_WLE[0, found.spec.layer_ids_L.index(layer), expert] == count
