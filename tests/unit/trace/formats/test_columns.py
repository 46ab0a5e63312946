"""Tables by the meaning of their columns, and formats told by content."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from moetool.base.errors import MoetoolError, UsageError
from moetool.cli.main import app
from moetool.trace.expert_counts import ExpertCounts
from moetool.trace.foreign.column_table import parse_map
from moetool.trace.foreign.exporting import export_trace
from moetool.trace.foreign.importing import formats_with, import_trace
from moetool.trace.reader import Trace
from tests import foreign
from tests.foreign import EXPERTS, IDS, LAYERS, PROMPT, ROUTES, TOKENS
from tests.refusals import refused

SAID = {"num_experts": EXPERTS, "expert_bytes": 1000}


def long_rows(layer: str = "layer", expert: str = "expert") -> list[dict[str, Any]]:
    """A row for each expert of each token, in no order that an engine would write."""
    rows = [
        {
            "request": name,
            "token": token,
            layer: place + 1,
            "rank": slot,
            expert: int(ROUTES[name][token, place, slot]),
            "weight": 0.75 - slot / 2,
            "phase": "prompt" if token < PROMPT[name] else "generated",
            "token_id": IDS[name][token],
            "task": f"task {name}",
        }
        for name in "ab"
        for token in range(TOKENS[name])
        for place in range(LAYERS)
        for slot in range(2)
    ]
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def wide_rows() -> list[dict[str, Any]]:
    """A row for each token and layer, as logs of Mixtral have them."""
    return [
        {
            "dataset": f"task {name}",
            "problem_id": name,
            "layer": place + 1,
            "experts": ROUTES[name][token, place].tolist(),
            "gating_probs": [0.75, 0.25],
            "token_idx": token,
        }
        for name in "ab"
        for token in range(TOKENS[name])
        for place in range(LAYERS)
    ]


def write_csv(path: Path, rows: list[dict[str, Any]], separator: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def bring(file: Path, mapping: str = "", **said: Any) -> Trace:
    made = import_trace(
        [file],
        None,
        file.parent / "t",
        settings={**SAID, **said},
        mapping=parse_map([mapping] if mapping else []),
        overwrite=True,
    )
    assert made.format == "columns"
    trace = Trace(file.parent / "t")
    trace.verify()
    return trace


def check_routes(trace: Trace, names: str = "ab") -> None:
    found = {row["request"]: row for row in trace.requests.to_pylist()}
    for rows in trace.whole_requests(["weights"]):
        name = found[int(rows.request_T[0])]["prompt_id"].rsplit("/", 1)[1]
        assert (rows.experts_TS.reshape(ROUTES[name].shape) == ROUTES[name]).all()
        assert rows.weights_TS is not None and (rows.weights_TS.reshape(-1, 2) == [0.75, 0.25]).all()
    assert len(found) == len(names)


@pytest.mark.parametrize("write", [write_csv, write_jsonl, write_json, write_parquet])
@pytest.mark.parametrize("rows", [long_rows, wide_rows])
def test_tables_of_every_kind_bring_the_same_routes(
    tmp_path: Path, write: Callable[..., Path], rows: Callable[[], list[dict[str, Any]]]
) -> None:
    trace = bring(write(tmp_path / "file", rows()))
    check_routes(trace)
    assert trace.spec.layer_ids_L == (1, 2, 3) and trace.spec.renormalize
    assert sorted(trace.requests["task"].to_pylist()) == ["task a", "task b"]
    if rows is long_rows:
        told = dict(zip(trace.requests["task"].to_pylist(), trace.requests["prompt_tokens"].to_pylist(), strict=True))
        assert told == {"task a": PROMPT["a"], "task b": PROMPT["b"]}
        assert next(iter(trace.batches())).token_id_T.min() > 0


def test_columns_are_mapped_by_name_or_number(tmp_path: Path) -> None:
    renamed = [
        {"l": r["layer"], "x": r["expert"], "pos": r["token"], "who": r["request"], "p": r["weight"], "r": r["rank"]}
        for r in long_rows()
    ]
    check_routes(bring(write_csv(tmp_path / "f.tsv", renamed, "\t"), "expert=x,request=who,weight=p,rank=r"))
    plain = tmp_path / "plain.csv"
    plain.write_text(
        "".join(
            f"{r['l']},{r['x']},{r['pos']},{r['who'] == 'b'},{r['p']},{r['r']}\n".replace("True", "1").replace(
                "False", "0"
            )
            for r in renamed
        )
    )
    made = bring(plain, "layer=1,expert=2,token=3,request=4,weight=5,rank=6")
    assert {row["prompt_id"] for row in made.requests.to_pylist()} == {"plain/0", "plain/1"}
    with refused(UsageError, "l, x"):
        bring(tmp_path / "f.tsv", "expert=y")
    with refused(UsageError, "expert"):
        parse_map(["exprt=x"])
    with refused(UsageError, "none", "known", "expert"):
        bring(tmp_path / "f.tsv", "layer=l")
    with refused(UsageError, "--map"):
        import_trace([foreign.write_policylang(tmp_path / "p")], "policylang", tmp_path / "u", mapping={"layer": "l"})


def test_a_line_of_metadata_and_aliases_of_fields_are_understood(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "f", [{"record_type": "metadata", "model": "x"}, *wide_rows()])
    trace = bring(file)
    check_routes(trace)
    assert any(note.startswith("1 rows") for note in trace.manifest["provenance"]["imported"]["notes"])
    renamed = [{"l": r["layer"], "x": r["experts"], "t": r["token_idx"], "who": r["problem_id"]} for r in wide_rows()]
    trace = bring(write_jsonl(tmp_path / "g", renamed), "experts=x,layer_id=l,position=t,sequence=who")
    assert len(trace.requests) == 2
    with refused(UsageError, "expert", "twice"):
        parse_map(["expert=x,experts=y"])


def test_new_tokens_without_a_prompt_arrive_as_such(tmp_path: Path) -> None:
    rows = [{**row, "token": row["token"] + 40, "phase": "decode"} for row in long_rows()]
    trace = bring(write_csv(tmp_path / "f.csv", rows))
    check_routes(trace)
    assert trace.unrecorded_prompts == 2
    for found in trace.whole_requests():
        assert found.position_T[0] == 40 and set(found.phase_T.tolist()) == {1} and found.iteration_T[0] == 1


def test_rows_without_a_token_are_told_by_their_order(tmp_path: Path) -> None:
    rows = [{"layer": r["layer"], "experts": r["experts"]} for r in wide_rows() if r["problem_id"] == "a"]
    made = import_trace([write_jsonl(tmp_path / "f", rows)], None, tmp_path / "t", settings=SAID)
    assert any("from the order of the rows" in note for note in made.notes)
    (found,) = Trace(tmp_path / "t").whole_requests()
    assert (found.experts_TS.reshape(ROUTES["a"].shape) == ROUTES["a"]).all()


def drop(at: int) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda rows: rows[:at] + rows[at + 1 :]


def put(name: str, value: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda rows: [{**rows[0], name: value}, *rows[1:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(5), "rows are missing or twice"),
        (lambda rows: [*rows, rows[3]], "rows are missing or twice"),
        (put("expert", 99), "uses expert 99"),
        (put("expert", -1), "expert -1"),
        (put("expert", "x"), "not whole numbers|not lists"),
        (put("layer", 1.5), "not whole numbers"),
        (put("weight", -0.5), "weights below 0"),
        (put("phase", "thinking"), "phase 'thinking'"),
        (lambda rows: [{**row, "task": f"task {row['token'] % 2}"} for row in rows], "several tasks"),
        (
            lambda rows: [{**row, "phase": "prompt" if row["token"] == 3 else "decode"} for row in rows],
            "prompt rows after new tokens",
        ),
        (put("token", None), "empty cells in token"),
    ],
)
def test_damaged_tables_are_refused(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], message: str
) -> None:
    file = write_csv(tmp_path / "f.csv", change(long_rows()))
    with pytest.raises(MoetoolError, match=message) as refusal:
        bring(file)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"layer": 1}', "layer,expert\n", "layer,expert\n1\n", "\0\1\2"])
def test_what_is_no_table_is_refused_with_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    for mapping in ({}, {"layer": "layer", "expert": "expert"}):
        with pytest.raises(MoetoolError) as refusal:
            import_trace([tmp_path / "f"], "columns", tmp_path / "t", settings=SAID, mapping=mapping)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("format", ["route_csv", "topk_parquet"])
def test_a_size_that_a_file_does_not_know_may_be_given(format: str, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "c.csv", [row | {"task": "one"} for row in long_rows()])
    import_trace([file], None, tmp_path / "t", settings={"num_experts": EXPERTS})
    assert not Trace(tmp_path / "t").spec.sized
    export_trace(tmp_path / "t", format, tmp_path / "again")
    import_trace([tmp_path / "again"], format, tmp_path / "u", settings={"expert_bytes": 1000})
    assert Trace(tmp_path / "u").spec.expert_bytes_L == (1000,) * LAYERS
    export_trace(tmp_path / "u", format, tmp_path / "sized")
    with refused(MoetoolError, "expert_bytes 1000", "expected 9", "leave out --set expert_bytes"):
        import_trace([tmp_path / "sized"], format, tmp_path / "v", settings={"expert_bytes": 9})


@pytest.mark.parametrize(
    ("text", "facts"),
    [('{"a":\n', ("line 1 is not JSON", "cut off")), ("a,b\n1,2\n", ("it begins with 'a,b'", "--map layer=COLUMN"))],
)
def test_a_file_that_no_format_knows_is_quoted(text: str, facts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(MoetoolError) as refusal:
        import_trace([tmp_path / "f"], None, tmp_path / "t")
    assert "\n" not in str(refusal.value) and all(fact in str(refusal.value) for fact in facts)


def test_counts_of_any_table(tmp_path: Path) -> None:
    counts = np.random.default_rng(3).integers(1, 9, (LAYERS, EXPERTS))
    rows = [{"Layer": i + 1, "Expert": e, "Count": int(counts[i, e])} for i in range(LAYERS) for e in range(EXPERTS)]
    file = write_csv(tmp_path / "f.csv", rows)
    made = import_trace([file], None, tmp_path / "t", settings={"top_k": 2, "expert_bytes": 1000})
    assert (made.kind, made.format) == ("counts", "column_counts")
    assert (ExpertCounts(tmp_path / "t").counts_WLE[0] == counts).all()
    with refused(MoetoolError, "expert", "layer", "twice"):
        import_trace(
            [write_csv(file, [*rows, rows[0]])], None, tmp_path / "u", settings={"top_k": 2, "expert_bytes": 1}
        )


def guessed_files(folder: Path) -> dict[str, Path]:
    """A file of each format that tells itself, as its program writes it."""
    return {
        "policylang": foreign.write_policylang(folder / "p.parquet"),
        "vllm_routed_experts": write_jsonl(folder / "v.json", [foreign.vllm_response("a")]),
        "sglang_routed_experts": write_jsonl(folder / "s.json", [foreign.sglang_native("a")]),
        "columns": write_csv(folder / "c.csv", long_rows()),
    }


def test_formats_are_told_by_content_and_said(tmp_path: Path) -> None:
    files = guessed_files(tmp_path)
    for name, file in files.items():
        settings = {} if name in ("policylang",) else {"num_experts": 8}
        more = {"top_k": 2, "num_hidden_layers": 4} if name.startswith("sglang") else {}
        shape = {"first_k_dense": 1} if "routed" in name else {}
        made = import_trace([file], None, tmp_path / name, settings={"expert_bytes": 1000, **settings, **more, **shape})
        assert made.format == name and made.guessed
    run = CliRunner().invoke(
        app,
        [
            "trace",
            "import",
            str(files["columns"]),
            "--out",
            str(tmp_path / "cli"),
            "--set",
            "num_experts=8",
            "--set",
            "expert_bytes=1000",
        ],
    )
    assert run.exit_code == 0 and "read as columns: a table with columns for layer (layer)" in run.stderr
    (tmp_path / "odd").write_text("hello")
    with refused(UsageError, "unknown", "format"):
        import_trace([tmp_path / "odd"], None, tmp_path / "u")
    with refused(UsageError, "import"):
        import_trace([files["columns"], files["policylang"]], None, tmp_path / "u")
    # both a layer with its expert and a count, and a usage file's triples
    assert {"columns", "coli_usage", "llamacpp_imatrix"} <= set(formats_with("recognize"))


def test_an_ambiguous_file_lists_the_candidates(tmp_path: Path) -> None:
    response = {
        **foreign.vllm_response("a"),
        **foreign.sglang_openai("a"),
        "choices": foreign.vllm_response("a")["choices"],
    }
    file = write_jsonl(tmp_path / "both.json", [response])
    with refused(UsageError, "sglang_routed_experts", "vllm_routed_experts", "--format"):
        import_trace([file], None, tmp_path / "t", settings=SAID)
