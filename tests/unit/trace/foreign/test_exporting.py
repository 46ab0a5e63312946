"""Exports: read back they give the same rows, and of a foreign file the same foreign file again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

from moetool.base import plugins
from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.trace.expert_counts import ExpertCounts
from moetool.trace.foreign.exporting import export_trace
from moetool.trace.foreign.importing import formats_with, import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests import foreign, synthetic_routes, traces

LENGTHS = [(4, 3), (2, 4), (5, 1)]
BY_REQUEST = ("sglang_routed_experts", "vllm_routed_experts", "sglang_per_token", "policylang", "moe_cache_lab")
WITH_WEIGHTS = ("policylang", "moe_cache_lab", "topk_parquet", "route_csv")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Requests of equal layers that ran one after the other."""
    path = tmp_path_factory.mktemp("export") / "trace"
    return Trace(synthetic_routes.write_trace(path, num_requests=4, prompt_tokens=5, new_tokens=3, keep=("topk",)))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Layers 1, 2 and 4 of different shape, requests that ran together, every column."""
    path = tmp_path_factory.mktemp("uneven") / "trace"
    return traces.write(path, traces.together(LENGTHS), LENGTHS)


def files_of(out: Path) -> list[Path]:
    return sorted(out.glob("*.jsonl")) if out.is_dir() and not (out / "meta_info.json").exists() else [out]


def back(out: Path, format: str, into: Path, **said: Any) -> Trace | ExpertCounts:
    made = import_trace(files_of(out), format, into, settings=said)
    return Trace(into) if made.kind == "trace" else ExpertCounts(into)


def whole(trace: Trace, columns: tuple[str, ...] = ()) -> list[TokenBatch]:
    return list(trace.whole_requests(columns))


@pytest.mark.parametrize("format", [*BY_REQUEST, "topk_parquet", "route_csv"])
def test_an_export_is_read_back_with_the_same_rows(trace: Trace, tmp_path: Path, format: str) -> None:
    source = trace
    if format == "topk_parquet":
        from moetool.trace.edit import split

        source = split(trace, tmp_path / "parts", by="task")["code"]
    out = tmp_path / "out"
    made = export_trace(source.path, format, out)
    assert made.bytes == sum(file.stat().st_size for file in ([out] if out.is_file() else out.iterdir()))
    again = back(out, format, tmp_path / "again", model=str(trace.path))
    assert isinstance(again, Trace) and again.spec == source.spec
    columns = ("weights",) if format in WITH_WEIGHTS else ()
    for before, after in zip(whole(source, columns), whole(again, columns), strict=True):
        for name in ("experts_TS", "weights_TS", "position_T"):
            assert np.array_equal(getattr(before, name), getattr(after, name)), name
        if format != "topk_parquet":  # which does not mark the prompt
            assert np.array_equal(before.phase_T, after.phase_T)
            assert np.array_equal(before.iteration_T, after.iteration_T)
        if format in ("sglang_per_token", "policylang", "moe_cache_lab"):
            assert np.array_equal(before.token_id_T, after.token_id_T)
    assert not list(tmp_path.glob("*.partial*"))


def test_what_ran_together_is_kept_where_the_format_has_it(trace: Trace, tmp_path: Path) -> None:
    lengths = [(4, 3), (2, 4), (5, 1)]
    source = _together(tmp_path / "source", trace, lengths)
    export_trace(source.path, "sglang_per_token", tmp_path / "r.pt")
    again = back(tmp_path / "r.pt", "sglang_per_token", tmp_path / "again", model=str(source.path))
    assert isinstance(again, Trace)

    def forwards(one: Trace) -> list[list[tuple[int, int]]]:
        return [
            sorted(zip(rows.request_T.tolist(), rows.position_T.tolist(), strict=True))
            for rows in one.recorded_forwards([])
        ]

    assert forwards(again) == forwards(source)
    for before, after in zip(whole(source), whole(again), strict=True):
        assert np.array_equal(before.experts_TS, after.experts_TS)
        assert np.array_equal(before.token_id_T, after.token_id_T)


def _together(path: Path, like: Trace, lengths: list[tuple[int, int]]) -> Trace:
    from moetool.base import durable
    from moetool.trace.writer import TraceWriter

    with durable.staged_directory(path) as folder:
        writer = TraceWriter(folder, like.spec, ["topk"])
        forwards = []
        for forward in range(6):
            parts = []
            for request, (prompt, new) in enumerate(lengths):
                if 0 <= forward - request < new:
                    positions = range(prompt) if forward == request else [prompt + forward - request - 1]
                    parts.append(traces.rows(request, forward, forward - request, positions, like.spec))
            forwards += [TokenBatch.concatenate(parts)] if parts else []
        for rows in forwards:
            writer.append(rows)
        for request, (prompt, new) in enumerate(lengths):
            facts: dict[str, Any] = {"dataset": "d", "task": "t", "prompt_id": str(request)}
            writer.add_request(request, prompt_tokens=prompt, new_tokens=new, **facts)
        writer.finish(composition={"kind": "log"}, provenance={})
    return Trace(path)


@pytest.mark.parametrize("format", ["sglang_stat", "sglang_per_pass", "tensorrt_llm_statistics"])
def test_counts_of_a_trace_are_read_back_and_written_again(trace: Trace, tmp_path: Path, format: str) -> None:
    export_trace(trace.path, format, tmp_path / "x", num_hidden_layers=5)
    counts = back(tmp_path / "x", format, tmp_path / "c", **_five(format, trace))
    assert isinstance(counts, ExpertCounts)
    forwards = list(trace.recorded_forwards([]))
    assert len(counts.counts_WLE) == len(forwards) and counts.num_tokens == trace.num_tokens
    for count_LE, rows in zip(counts.counts_WLE, forwards, strict=True):
        experts = rows.experts_TS.reshape(len(rows), trace.spec.num_layers, -1)
        for layer in range(trace.spec.num_layers):
            assert (count_LE[layer] == np.bincount(experts[:, layer].ravel(), minlength=8)).all()
    export_trace(tmp_path / "c", format, tmp_path / "y", num_hidden_layers=5)
    again = back(tmp_path / "y", format, tmp_path / "d", **_five(format, trace))
    assert isinstance(again, ExpertCounts) and (again.counts_WLE == counts.counts_WLE).all()
    with pytest.raises(UsageError, match=r"holds counts, not routes; export to one of coli_usage, .*sglang_per_pass"):
        export_trace(tmp_path / "c", "policylang", tmp_path / "z")


def _five(format: str, trace: Trace) -> dict[str, Any]:
    """Four MoE layers and a fifth without experts, where the format has it."""
    if format == "tensorrt_llm_statistics":
        return {"model": str(trace.path)}
    return {"moe_layers": "0..3", "num_experts": 8, "top_k": 2, "expert_bytes": 1024}


def test_raw_statistics_keep_every_token_of_every_forward(trace: Trace, tmp_path: Path) -> None:
    export_trace(trace.path, "tensorrt_llm_raw", tmp_path / "x")
    again = back(tmp_path / "x", "tensorrt_llm_raw", tmp_path / "t", model=str(trace.path))
    assert isinstance(again, Trace)
    rows = [TokenBatch.concatenate(list(one.batches())) for one in (trace, again)]
    assert np.array_equal(rows[0].experts_TS, rows[1].experts_TS)
    counts = back(tmp_path / "x", "tensorrt_llm_statistics", tmp_path / "c", model=str(trace.path))
    assert isinstance(counts, ExpertCounts) and counts.num_tokens == trace.num_tokens


def test_layers_of_different_shape_go_where_they_can_be_said(uneven: Trace, tmp_path: Path) -> None:
    said = {"model": str(uneven.path)}
    export_trace(uneven.path, "moe_cache_lab", tmp_path / "m")
    again = back(tmp_path / "m", "moe_cache_lab", tmp_path / "am", **said)
    assert isinstance(again, Trace)
    for before, after in zip(whole(uneven, ("weights",)), whole(again, ("weights",)), strict=True):
        assert np.array_equal(before.experts_TS, after.experts_TS)
        assert np.array_equal(before.weights_TS, after.weights_TS)
    for format in ("vllm_routed_experts", "sglang_per_token", "route_csv", "topk_parquet", "tensorrt_llm_raw"):
        with pytest.raises(MismatchError, match=r"has one num_experts for all layers, .*export to policylang"):
            export_trace(uneven.path, format, tmp_path / "x")
        assert not (tmp_path / "x").exists()


def test_logits_come_back_from_policylang(tmp_path: Path) -> None:
    path = synthetic_routes.write_trace(tmp_path / "t", num_requests=2, keep=("topk", "logits"))
    export_trace(path, "policylang", tmp_path / "p.parquet")
    again = back(tmp_path / "p.parquet", "policylang", tmp_path / "again", model=str(path))
    assert isinstance(again, Trace)
    for before, after in zip(whole(Trace(path), ("logits",)), whole(again, ("logits",)), strict=True):
        assert np.array_equal(before.logits_TF, after.logits_TF)
    softmax = np.array(pq.read_table(tmp_path / "p.parquet")["router_softmax"].to_pylist())
    assert np.allclose(softmax.sum(axis=1), 1)


# --- a foreign file, imported and exported, is the same foreign file


def test_moe_cache_lab_gives_the_same_bytes(tmp_path: Path) -> None:
    records = foreign.moe_cache_lab_records()
    about = {"capture_method": "exported by moetool", "model_revision": None}
    file = tmp_path / "a.jsonl"
    foreign.write_lines(file, records[0], *records[1:])
    import_trace([file], "moe_cache_lab", tmp_path / "t", settings={"expert_bytes": 9})
    export_trace(tmp_path / "t", "moe_cache_lab", tmp_path / "out")
    revision = Trace(tmp_path / "t").spec.revision
    expected = [{**records[0], **about, "model_revision": revision}, *records[1:]]
    text = "".join(json.dumps(r, sort_keys=True, separators=(",", ":")) + "\n" for r in expected)
    assert (tmp_path / "out" / "00000.jsonl").read_text() == text


def test_routed_experts_give_the_same_arrays(tmp_path: Path) -> None:
    for format, of in (
        ("sglang_routed_experts", foreign.sglang_native),
        ("vllm_routed_experts", foreign.vllm_response),
    ):
        file = foreign.write_lines(tmp_path / f"{format}.jsonl", of("a"), of("b"))
        import_trace([file], format, tmp_path / format, settings=foreign.HEADLESS)
        export_trace(tmp_path / format, format, tmp_path / "out.jsonl", overwrite=True)
        written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        for name, response in zip("ab", written, strict=True):
            given = of(name)
            if "meta_info" in given:
                expected = {**given["meta_info"], "id": f"{format}/{name}"}
                assert response["meta_info"] == expected
            else:
                assert response["choices"][0]["routed_experts"] == given["choices"][0]["routed_experts"]
                assert response["usage"].items() >= given["usage"].items()


def test_the_recorder_gives_the_same_logical_experts(tmp_path: Path) -> None:
    file = foreign.save(tmp_path / "r.pt", foreign.recorder_pack())
    import_trace([file], "sglang_per_token", tmp_path / "t", settings={"first_k_dense": 1, "expert_bytes": 9})
    export_trace(tmp_path / "t", "sglang_per_token", tmp_path / "out.pt")
    given, made = (torch.load(path, weights_only=True) for path in (file, tmp_path / "out.pt"))
    for before, after in zip(given["records"], made["records"], strict=True):
        for key in ("input_ids", "positions", "extend_seq_lens", "forward_mode"):
            assert before[key] == after[key], key
        for layer in range(foreign.HIDDEN):
            slots = before["topk_ids_of_layer"][layer].numpy()
            logical = np.where(slots < 0, -1, foreign.MAPPING[layer][slots])
            assert np.array_equal(logical, after["topk_ids_of_layer"][layer].numpy())


def test_statistics_give_the_same_arrays(tmp_path: Path) -> None:
    stat = foreign.save(tmp_path / "s.pt", foreign.stat_pack())
    import_trace([stat], "sglang_stat", tmp_path / "s", settings={**foreign.SHAPE, "top_k": 2})
    export_trace(tmp_path / "s", "sglang_stat", tmp_path / "out.pt")
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    used = foreign.stat_pack()["logical_count"][: len(foreign.FORWARDS)]
    assert made["logical_count"].dtype == torch.int32 and torch.equal(made["logical_count"], used)
    folder = foreign.write_tensorrt(tmp_path / "trt")
    (folder / "rank1.safetensors").unlink()
    import_trace([folder], "tensorrt_llm_statistics", tmp_path / "c", settings={"expert_bytes": 9})
    export_trace(tmp_path / "c", "tensorrt_llm_statistics", tmp_path / "again")
    given, made = (load_file(each / "rank0.safetensors") for each in (folder, tmp_path / "again"))
    moved = {f"{int(key.split('_')[0]) - 50}_{key.split('_')[1]}": array for key, array in given.items()}
    assert made.keys() == moved.keys() and all(np.array_equal(made[key], moved[key]) for key in made)


def test_formats_are_read_and_written_but_for_those_of_one_direction() -> None:
    reads, writes = (set(formats_with(f"{verb}_routes", f"{verb}_counts")) for verb in ("read", "write"))
    # no program's own, or with activations, or forms of published data sets and of trainers
    assert reads - writes == {
        *("columns", "column_counts", "llamacpp_imatrix", "expert_arrays", "router_logits"),
        *("router_data", "flame_moe", "routed_experts_rows", "wide_counts"),
    }
    assert writes <= reads
    for name in plugins.names("format"):
        module = plugins.load("format", name)
        assert hasattr(module, "recognize") == (name in reads)


def test_exports_that_make_no_sense_are_refused(trace: Trace, tmp_path: Path) -> None:
    def refused(message: str, path: Path, format: str, out: Path, **options: Any) -> None:
        with pytest.raises(MoetoolError, match=message):
            export_trace(path, format, out, **options)

    refused("did you mean 'policylang'", trace.path, "policy_lang", tmp_path / "x")
    refused("unknown format of routes 'vllm_ascend'", trace.path, "vllm_ascend", tmp_path / "x")
    refused("no trace at", tmp_path / "none", "policylang", tmp_path / "x")
    refused("has one task per file, .*trace split", trace.path, "topk_parquet", tmp_path / "x")
    refused("num_hidden_layers is 2", trace.path, "sglang_stat", tmp_path / "x", num_hidden_layers=2)
    export_trace(trace.path, "policylang", tmp_path / "x")
    refused("exists already", trace.path, "policylang", tmp_path / "x")
    (tmp_path / "mine").mkdir()
    refused("holds no 00000.jsonl", trace.path, "moe_cache_lab", tmp_path / "mine", overwrite=True)
    export_trace(trace.path, "moe_cache_lab", tmp_path / "m")
    export_trace(trace.path, "moe_cache_lab", tmp_path / "m", overwrite=True)
    file = foreign.write_lines(tmp_path / "v.jsonl", foreign.vllm_response("a"))
    import_trace([file], "vllm_routed_experts", tmp_path / "v", settings=foreign.SHAPE)
    refused("topk_parquet needs weights", tmp_path / "v", "topk_parquet", tmp_path / "y")
