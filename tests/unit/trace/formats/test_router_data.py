"""The published form of gpt-oss-20b's routes, and the authors' own counts of them."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import MismatchError, MoetoolError
from moetool.trace.expert_counts import count_experts
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from tests.published_routes import SHARED
from tests.refusals import refused

GPT_OSS = SHARED / "data" / "routes" / "gpt_oss_20b"
needs_gpt_oss = pytest.mark.skipif(not GPT_OSS.is_dir(), reason="shared/data/routes is not here")


def token(position: int, experts: list[list[int]]) -> dict[str, Any]:
    layers = {
        f"layer_{i}": {"selected_experts": chosen, "selected_probs": [0.75, 0.25]} for i, chosen in enumerate(experts)
    }
    return {f"token_{position}": layers}


def request(row: int, first: int) -> dict[str, Any]:
    rows = [token(first + i, [[i, 7], [6, i]]) for i in range(3)]
    return {"row_index": row, "dataset": "law", "full_text": None, "router_data": rows}


@pytest.mark.parametrize("form", ["object", "list", "lines", "gzip"])
def test_requests_of_every_form_arrive(tmp_path: Path, form: str) -> None:
    objects = [request(5, 12)] if form == "object" else [request(5, 12), request(6, 0)]
    text = {
        "object": json.dumps(objects[0]),
        "list": json.dumps(objects),
        "lines": "\n".join(map(json.dumps, objects)),
        "gzip": json.dumps(objects, indent=1),
    }[form]
    file = tmp_path / "f"
    file.write_bytes(gzip.compress(text.encode()) if form == "gzip" else text.encode())
    made = import_trace([file], None, tmp_path / "t")
    assert made.format == "router_data" and made.requests == len(objects)
    trace = Trace(tmp_path / "t")
    rows = next(iter(trace.whole_requests(["weights"])))
    assert rows.experts_TS.tolist() == [[0, 7, 6, 0], [1, 7, 6, 1], [2, 7, 6, 2]]
    assert rows.position_T.tolist() == [12, 13, 14] and set(rows.phase_T.tolist()) == {1}
    assert rows.weights_TS is not None and set(rows.weights_TS.ravel().tolist()) == {0.75, 0.25}
    # a request that begins at position 0 does not say where its prompt ends
    assert trace.requests["prompt_tokens"].to_pylist() == [0, 1][: len(objects)]
    assert trace.spec.renormalize and trace.spec.num_experts == 8 and trace.unrecorded_prompts == 1


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda r: r["router_data"].insert(0, r["router_data"][2]), "token 12 after 14"),
        (lambda r: r["router_data"][1]["token_13"].pop("layer_1"), "token_13"),
        (lambda r: r["router_data"][1]["token_13"]["layer_1"].update(selected_experts=[1]), "layer_1"),
        (lambda r: r["router_data"][1]["token_13"]["layer_1"].update(selected_experts=[1, "x"]), "layer_1"),
        (lambda r: r["router_data"][1]["token_13"]["layer_1"].update(selected_experts=[1, 1]), "1, 1"),
        (lambda r: r["router_data"][1]["token_13"]["layer_1"].update(selected_experts=[1, 10**30]), "64 bits"),
        (lambda r: r["router_data"].append({"token": {}}), "'token'"),
        (lambda r: r["router_data"].append([1]), "1"),
        (lambda r: r.update(router_data=[]), "no router_data"),
    ],
)
def test_damaged_objects_are_refused(tmp_path: Path, change: Any, fact: str) -> None:
    held = request(5, 12)
    change(held)
    (tmp_path / "f").write_text(json.dumps(held))
    with pytest.raises(MoetoolError, match=fact) as refusal:
        import_trace([tmp_path / "f"], "router_data", tmp_path / "t")
    assert "\n" not in str(refusal.value) and not (tmp_path / "t").exists()


def test_half_a_gzip_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.gz").write_bytes(gzip.compress(json.dumps(request(5, 12)).encode())[:-20])
    with refused(MismatchError, "f.gz"):
        import_trace([tmp_path / "f.gz"], "router_data", tmp_path / "t")


def published_counts(entry: dict[str, Any], num_layers: int, num_experts: int) -> np.ndarray:
    counts_LE = np.zeros((num_layers, num_experts))
    for layer, shares in entry["think"].items():
        for expert, share in shares.items():
            counts_LE[int(layer.removeprefix("layer_")), int(expert)] = share * entry["num_think_tokens"]
    return counts_LE


def oracle() -> dict[str, dict[str, Any]]:
    with gzip.open(GPT_OSS / "published_count_frequency.json.gz") as file:
        found: dict[str, dict[str, Any]] = json.load(file)
    return found


@needs_gpt_oss
def test_the_raw_form_counts_as_its_authors_do(tmp_path: Path) -> None:
    import_trace([GPT_OSS / "raw_form_sample.json.gz"], None, tmp_path / "t")
    trace = Trace(tmp_path / "t")
    (rows,) = trace.whole_requests()
    assert rows.position_T[0] == 178 and len(rows) == 330
    # the sample's data set and category; it is a finished answer
    keys = [key for key in oracle() if key.startswith("data/gpqa_diamond/Genetics/")]
    matches = []
    for key in keys:
        entry = oracle()[key]
        first = rows.select(slice(0, int(entry["num_think_tokens"]) - 2))
        expected = published_counts(entry, 24, 32)
        matches.append(np.allclose(count_experts(trace.spec, first.experts_TS), expected, atol=1e-6))
    assert matches.count(True) == 1


@needs_gpt_oss
def test_all_published_counts_of_the_parquet_files_are_met(tmp_path: Path) -> None:
    with (GPT_OSS / "requests.csv").open(newline="") as file:
        rows_of = {row["file"]: row for row in csv.DictReader(file)}
    compared = 0
    with_counts = {rows_of[key]["dataset"] for key in oracle()}
    here = {file.stem for file in GPT_OSS.glob("*.parquet")}
    # of gpqa_diamond, the file of the test above is here
    gpqa = {f"gpqa_{part}" for part in ("diamond", "extended", "main")}
    assert with_counts - here == {"mmlu_dev", "mmlu_pro_validation", "mmlu_validation", "sorry_bench_base", *gpqa}
    for dataset in sorted(with_counts & here):
        wanted = {key: entry for key, entry in oracle().items() if rows_of[key]["dataset"] == dataset}
        made = import_trace([GPT_OSS / f"{dataset}.parquet"], None, tmp_path / dataset)
        trace = Trace(tmp_path / dataset)
        assert trace.unrecorded_prompts == made.requests  # no source has prompt rows
        numbers = {row["prompt_id"]: row["request"] for row in trace.requests.to_pylist()}
        held = {int(rows.request_T[0]): rows for rows in trace.whole_requests()}
        for key, entry in wanted.items():
            facts = rows_of[key]
            rows = held[numbers[f"{dataset}/{facts['sequence_in_file']}"]]
            assert len(rows) == int(facts["rows"])
            # an unfinished answer is all thinking; a finished one counts two tokens less than it says
            first = rows.select(slice(int(entry["num_think_tokens"]) - 2 if facts["finished"] == "True" else None))
            expected = published_counts(entry, 24, 32)
            assert np.allclose(count_experts(trace.spec, first.experts_TS), expected, atol=1e-6), key
            compared += 1
    assert compared == 22 and with_counts & here == {"mmlu_test"}
