"""The records of SGLang, vLLM and TensorRT-LLM: what they say arrives, what is wrong with them is refused."""

import base64
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.models.shape import shape_of
from moetool.trace.expert_counts import ExpertCounts
from moetool.trace.foreign.exporting import export_trace
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from moetool.tuning.replay import replay
from tests import foreign, synthetic_routes
from tests.foreign import EXPERTS, HEADLESS, HIDDEN, IDS, PROMPT, ROUTES, SHAPE, TOKENS


def rows_of(path: Path) -> dict[int, TokenBatch]:
    trace = Trace(path)
    trace.verify()
    return {int(rows.request_T[0]): rows for rows in trace.whole_requests()}


def require_requests(path: Path, names: str = "ab") -> None:
    """The routes are those of the hand-made requests, with their prompts and forwards."""
    found = rows_of(path)
    table = Trace(path).requests
    for number, name in enumerate(names):
        rows = found[number]
        assert (rows.experts_TS.reshape(ROUTES[name].shape) == ROUTES[name]).all()
        assert rows.position_T.tolist() == list(range(TOKENS[name]))
        assert rows.iteration_T.tolist() == [max(0, t - PROMPT[name] + 1) for t in range(TOKENS[name])]
        assert table["prompt_tokens"][number].as_py() == PROMPT[name]
        assert table["new_tokens"][number].as_py() == TOKENS[name] + 1 - PROMPT[name]


def refused(message: str, file: Path | list[Path], format: str, settings: dict[str, Any] = HEADLESS) -> None:
    out = (file if isinstance(file, Path) else file[0]).parent / "refused"
    with pytest.raises(MoetoolError, match=message) as refusal:
        import_trace([file] if isinstance(file, Path) else file, format, out, settings=settings, find_model=shape_of)
    assert "\n" not in str(refusal.value)
    assert not out.exists()


# --- responses


@pytest.mark.parametrize("of", [foreign.sglang_native, foreign.sglang_openai])
def test_sglang_responses_become_requests(tmp_path: Path, of: Callable[[str], dict[str, Any]]) -> None:
    file = foreign.write_lines(tmp_path / "chat.jsonl", of("a"), of("b"))
    made = import_trace([file], "sglang_routed_experts", tmp_path / "t", settings=HEADLESS)
    require_requests(tmp_path / "t")
    trace = Trace(tmp_path / "t")
    assert trace.spec.layer_ids_L == (1, 2, 3) and trace.columns == {*trace.columns} - {"weights"}
    assert trace.requests["prompt_id"].to_pylist() == ["chat/a", "chat/b"]
    assert any("no weights" in note for note in made.notes)
    with pytest.raises(MismatchError, match="needs weights"):
        list(trace.batches(["weights"]))
    (row,) = replay(trace, ["lru"], [9000])
    assert row.decode_tokens == sum(TOKENS[name] - PROMPT[name] for name in "ab")


def test_one_response_or_a_list_is_a_file_too(tmp_path: Path) -> None:
    for i, value in enumerate([foreign.sglang_native("a"), [foreign.sglang_native("a"), foreign.sglang_native("b")]]):
        (tmp_path / f"{i}.json").write_text(json.dumps(value, indent=1))
        made = import_trace([tmp_path / f"{i}.json"], "sglang_routed_experts", tmp_path / f"t{i}", settings=HEADLESS)
        assert made.requests == i + 1


def test_a_later_start_is_found_from_the_usage(tmp_path: Path) -> None:
    file = foreign.write_lines(tmp_path / "r.jsonl", foreign.sglang_native("a", foreign.hidden_rows("a")[2:]))
    made = import_trace([file], "sglang_routed_experts", tmp_path / "t", settings=HEADLESS)
    rows = rows_of(tmp_path / "t")[0]
    assert rows.position_T.tolist() == [2, 3, 4, 5, 6] and rows.iteration_T.tolist() == [0, 0, 1, 2, 3]
    assert any("later position" in note for note in made.notes)
    file = foreign.write_lines(tmp_path / "s.jsonl", foreign.sglang_native("a", foreign.hidden_rows("a")[4:]))
    import_trace([file], "sglang_routed_experts", tmp_path / "u", settings=HEADLESS)
    rows = rows_of(tmp_path / "u")[0]
    assert rows.position_T.tolist() == [4, 5, 6] and rows.phase_T.tolist() == [1, 1, 1]
    assert Trace(tmp_path / "u").unrecorded_prompts == 1


def test_vllm_responses_become_requests(tmp_path: Path) -> None:
    file = foreign.write_lines(tmp_path / "v.jsonl", foreign.vllm_response("a"), foreign.vllm_response("b"))
    import_trace([file], "vllm_routed_experts", tmp_path / "t", settings=SHAPE)
    require_requests(tmp_path / "t")


def test_vllm_choices_share_a_prompt_and_tell_their_tokens(tmp_path: Path) -> None:
    whole = foreign.hidden_rows("a").astype(np.uint16)
    choices = [
        {"index": 0, "routed_experts": foreign.npy(whole[4:]), "token_ids": [*IDS["a"][4:], 99]},
        {"index": 1, "routed_experts": foreign.npy(whole[4:6]), "token_ids": [*IDS["a"][4:6], 98]},
    ]
    response = {
        "id": "x",
        "prompt_token_ids": IDS["a"][:4],
        "prompt_routed_experts": foreign.npy(whole[:4]),
        "choices": choices,
        "usage": {"prompt_tokens": 4, "completion_tokens": 7},
    }
    import_trace(
        [foreign.write_lines(tmp_path / "v.jsonl", response)], "vllm_routed_experts", tmp_path / "t", settings=SHAPE
    )
    first, second = rows_of(tmp_path / "t").values()
    assert (first.experts_TS.reshape(ROUTES["a"].shape) == ROUTES["a"]).all()
    assert first.token_id_T.tolist() == IDS["a"] and second.token_id_T.tolist() == IDS["a"][:6]
    assert Trace(tmp_path / "t").requests["prompt_id"].to_pylist() == ["v/x/0", "v/x/1"]


def changed(name: str, t: int, layer: int, k: int, value: int) -> np.ndarray:
    rows = foreign.hidden_rows(name)
    rows[t, layer, k] = value
    return rows


def repeated(name: str) -> np.ndarray:
    rows = foreign.hidden_rows(name)
    rows[2, 3] = rows[2, 3, 0]
    return rows


def without_layer(name: str, layer: int) -> np.ndarray:
    rows = foreign.hidden_rows(name)
    rows[:, layer] = 0
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed("a", 1, 2, 0, -1), "layer 2 uses expert -1, expected 0 to 7"),
        (changed("a", 1, 2, 0, 8), "layer 2 uses expert 8"),
        (changed("a", 0, 0, 0, 1), "layer 0 has experts, expected none; .*first_k_dense"),
        (repeated("a"), "layer 3 gives token 2 .* expected 2 different ones"),
        (without_layer("a", 1), "layer 1 is all zero.*recorder was off.*first_k_dense, or"),
        (foreign.hidden_rows("a")[:, :3], "expected a multiple of 32: int32 for 4 layers"),
        (np.concatenate([foreign.hidden_rows("a")] * 2), "14 rows for 4 prompt tokens and 4 new ones"),
    ],
)
def test_wrong_routed_experts_of_sglang_are_refused(tmp_path: Path, rows: np.ndarray, message: str) -> None:
    file = foreign.write_lines(tmp_path / "r.jsonl", foreign.sglang_native("a", rows))
    refused(message, file, "sglang_routed_experts")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (foreign.hidden_rows("a").astype(np.float32), "of float32"),
        (foreign.hidden_rows("a")[:, :, 0], "expected whole numbers .tokens, layers, top_k"),
        (foreign.hidden_rows("a")[:0], "of int32"),
        (foreign.hidden_rows("a").astype(np.int64) + 2**32, "layer 0 has experts"),
        (foreign.hidden_rows("a")[:, :, :1], "top_k 1 in each of 3 layers, expected 2 in each of 3 layers"),
        (foreign.hidden_rows("a")[:, :3], "3 layers, expected 4"),
        (changed("a", 1, 2, 0, 8), "expert 8"),
        (without_layer("a", 3), "all zero"),
    ],
)
def test_wrong_routed_experts_of_vllm_are_refused(tmp_path: Path, rows: np.ndarray, message: str) -> None:
    file = foreign.write_lines(tmp_path / "r.jsonl", foreign.vllm_response("a", rows))
    refused(message, file, "vllm_routed_experts")


def test_responses_that_are_none_are_refused(tmp_path: Path) -> None:
    file, whole = tmp_path / "r.jsonl", json.dumps(foreign.sglang_native("a"))
    texts: list[tuple[bytes, str]] = [
        (b"", "no object"),
        (b"\xff\xfe{", "is not text"),
        (f"{whole}\n{whole[:-40]}".encode(), "line 2 is not JSON"),
        (b"[1]", "is '1', expected a JSON object"),
        (json.dumps({"meta_info": {}}).encode(), "--enable-return-routed-experts"),
        (whole.replace('"prompt_tokens": 4', '"prompt_tokens": "4"').encode(), "prompt_tokens '4', expected int"),
        (whole.replace('"prompt_tokens": 4', '"prompt_tokens": -4').encode(), "prompt_tokens '-4'"),
        (whole.replace('"completion_tokens": 4', f'"completion_tokens": {2**40}').encode(), "completion_tokens"),
        (json.dumps({"meta_info": {"routed_experts": "@@"}}).encode(), "not base64"),
        (json.dumps({"meta_info": {"routed_experts": ""}}).encode(), "0 bytes"),
        (f"{whole}\n{whole}".encode(), "have the sequence 'a'"),
        (b"[" * 100_000, "not JSON"),
    ]
    for text, message in texts:
        file.write_bytes(text)
        refused(message, file, "sglang_routed_experts")
    header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    claim = "{'descr': '<i8', 'fortran_order': False, 'shape': (9999999, 9999999, 9999999), }"
    for raw, message in [
        (header + claim.ljust(117).encode() + b"\n", "9999999"),
        (b"PK\x03\x04", "not an .npy file"),
        (header + b"{'descr': '|O'", "not an .npy file"),
        (pickle.dumps([1]), "not an .npy file"),
    ]:
        text = base64.b64encode(raw).decode()
        foreign.write_lines(file, {"choices": [{"routed_experts": text}]})
        refused(message, file, "vllm_routed_experts")
    foreign.write_lines(file, {"choices": []})
    refused("no choices", file, "vllm_routed_experts")


def test_what_is_not_said_of_the_model_is_asked_for(tmp_path: Path) -> None:
    file = foreign.write_lines(tmp_path / "r.jsonl", foreign.sglang_native("a"))
    for missing in ("top_k", "num_hidden_layers"):
        said = {name: value for name, value in HEADLESS.items() if name != missing}
        refused(f"lacks {missing} .*--set model=PATH or --set {missing}=", file, "sglang_routed_experts", said)
    both = "lacks num_hidden_layers and top_k .* --set num_hidden_layers=NUMBER --set top_k=NUMBER"
    refused(both, file, "sglang_routed_experts", {"first_k_dense": 1})
    refused("layer 0 is all zero", file, "sglang_routed_experts", {**HEADLESS, "first_k_dense": 0})
    refused("both name", file, "sglang_routed_experts", {**HEADLESS, "moe_layers": "1..3"})
    refused("expected layers such as 1..26", file, "sglang_routed_experts", {"moe_layers": "many"})
    refused("did you mean 'top_k'", file, "sglang_routed_experts", {"topk": 2})
    refused("no model at 'nowhere'", file, "sglang_routed_experts", {"model": "nowhere"})
    refused("leave out --set top_k", file, "sglang_routed_experts", {"model": "reference", "top_k": 2})


def test_a_model_at_hand_says_all_and_has_to_agree(tmp_path: Path) -> None:
    file = foreign.write_lines(tmp_path / "v.jsonl", foreign.vllm_response("a"))
    said = {name: value for name, value in SHAPE.items() if name != "first_k_dense"}
    made = import_trace([file], "vllm_routed_experts", tmp_path / "t", settings={**said, "moe_layers": "1,2,3"})
    again = import_trace(
        [file], "vllm_routed_experts", tmp_path / "u", settings={"model": str(tmp_path / "t"), "task": "law"}
    )
    assert again.revision == made.revision and again.tasks == ["law"]
    other = synthetic_routes.write_trace(tmp_path / "other", num_requests=1)  # layers 0 to 3
    refused("layer 0 is all zero", file, "vllm_routed_experts", {"model": str(other)})


# --- the recorder


def test_per_token_finds_the_requests_and_their_experts(tmp_path: Path) -> None:
    file = foreign.save(tmp_path / "r.pt", foreign.recorder_pack())
    made = import_trace([file], "sglang_per_token", tmp_path / "t", settings={"first_k_dense": 1, "expert_bytes": 9})
    require_requests(tmp_path / "t")
    for number, rows in rows_of(tmp_path / "t").items():
        assert rows.token_id_T.tolist() == IDS["ab"[number]]
    trace = Trace(tmp_path / "t")
    assert trace.manifest["composition"] == {"kind": "log"}
    together = [sorted(set(rows.request_T.tolist())) for rows in trace.recorded_forwards([])]
    assert together == [[0], [0], [0, 1], [0, 1], [1]]
    assert any("last mapping" in note for note in made.notes)


def test_per_token_with_a_prefix_in_the_cache_and_a_late_start(tmp_path: Path) -> None:
    records = foreign.recorder_records()[2:]  # the recording began when request a was decoding its sixth token
    made = import_trace(
        [foreign.save(tmp_path / "r.pt", foreign.recorder_pack(records))],
        "sglang_per_token",
        tmp_path / "t",
        settings={"first_k_dense": 1, "expert_bytes": 9},
    )
    notes = " ".join(made.notes)
    # a's token at position 5 is a piece of one token of a mixed forward, so it is the prompt of a request of its own
    assert made.requests == 2 and "1 sequences begin after a prefix" in notes and "left out" not in notes
    records = foreign.recorder_records()[3:]
    file = foreign.save(tmp_path / "s.pt", foreign.recorder_pack(records))
    import_trace([file], "sglang_per_token", tmp_path / "late", settings={"first_k_dense": 1, "expert_bytes": 9})
    late = Trace(tmp_path / "late")
    assert late.unrecorded_prompts == len(late.requests) == 2
    assert late.num_tokens == sum(len(record["input_ids"]) for record in records)


def test_per_token_leaves_padding_out_and_counts_what_is_not_certain(tmp_path: Path) -> None:
    twins = [foreign.recorder_records()[i] for i in (0, 0, 1, 1)]
    joined = {**twins[0], **{key: twins[0][key] * 2 for key in ("input_ids", "positions", "extend_seq_lens")}}
    decode = {**twins[2], **{key: twins[2][key] * 3 for key in ("input_ids", "positions")}}
    for record, times in ((joined, 2), (decode, 3)):
        slots = torch.cat([record["topk_ids_of_layer"]] * times, 1)
        slots[:, 2 * len(record["input_ids"]) // times :] = slots[:, 2 * len(record["input_ids"]) // times :]
        record["topk_ids_of_layer"] = slots
        del record["global_physical_count"]
    decode["topk_ids_of_layer"][:, 2] = -1  # fills up the batch
    file = foreign.save(tmp_path / "r.pt", foreign.recorder_pack([joined, decode]))
    made = import_trace([file], "sglang_per_token", tmp_path / "t", settings={"first_k_dense": 1, "expert_bytes": 9})
    assert (made.requests, made.tokens) == (2, 10)
    assert any("1 tokens fit several sequences" in note for note in made.notes)


def test_the_files_of_several_ranks_are_tasks_whose_forwards_follow_one_another(tmp_path: Path) -> None:
    said = {"first_k_dense": 1, "expert_bytes": 9}
    files = [foreign.save(tmp_path / f"rank{i}.pt", foreign.recorder_pack()) for i in range(2)]
    made = import_trace(files, "sglang_per_token", tmp_path / "t", settings=said)
    assert made.tasks == ["rank0", "rank1"] and made.requests == 4
    assert any("rank1.pt holds the same routes as rank0.pt" in note for note in made.notes)
    together = [sorted(set(rows.request_T.tolist())) for rows in Trace(tmp_path / "t").recorded_forwards([])]
    assert together == [[0], [0], [0, 1], [0, 1], [1], [2], [2], [2, 3], [2, 3], [3]]


def test_stat_and_per_pass_become_counts(tmp_path: Path) -> None:
    expected = foreign.counts_by_forward()
    stat = foreign.save(tmp_path / "stat.pt", foreign.stat_pack())
    made = import_trace([stat], "sglang_stat", tmp_path / "s", settings={**SHAPE, "top_k": TOP_K} | {"task": None})
    counts = ExpertCounts(tmp_path / "s")
    assert made.kind == "counts" and (counts.counts_WLE == expected).all()
    assert made.tokens == sum(TOKENS.values()) and "4 passes without tokens left out" in made.notes
    files = [foreign.save(tmp_path / f"{i}.pt", pack) for i, pack in enumerate(foreign.per_pass_packs())]
    import_trace(files, "sglang_per_pass", tmp_path / "p", settings={**SHAPE, "top_k": TOP_K})
    assert (ExpertCounts(tmp_path / "p").counts_WLE == expected).all()
    with pytest.raises(MismatchError, match="holds counts of schema version 1, expected a trace"):
        Trace(tmp_path / "p")
    refused("pass 70 of rank 0 again", [files[0], files[0]], "sglang_per_pass", {**SHAPE, "top_k": TOP_K})
    refused("leave out --as and --set task", stat, "sglang_stat", {**SHAPE, "task": "law"})
    refused("layer 0 is all zero", stat, "sglang_stat", {**SHAPE, "top_k": 2, "first_k_dense": 0})
    refused("layer 1 has experts, expected none", stat, "sglang_stat", {**SHAPE, "top_k": 2, "first_k_dense": 2})
    refused(
        "num_experts 8 in each of 3 layers, expected 9", stat, "sglang_stat", {**SHAPE, "top_k": 2, "num_experts": 9}
    )
    off = {**foreign.stat_pack(), "logical_count": torch.zeros(9, 4, 8, dtype=torch.int32)}
    refused("the recorder was off", foreign.save(stat, off), "sglang_stat", {**SHAPE, "top_k": 2})
    negative = foreign.stat_pack()
    negative["logical_count"][0, 1, 0] = -1
    refused("a count of tokens is -1", foreign.save(stat, negative), "sglang_stat", {**SHAPE, "top_k": 2})


TOP_K = foreign.TOP_K
Pack = dict[str, Any]


def _slot(value: int) -> Callable[[Pack], None]:
    def change(pack: Pack) -> None:
        pack["records"][0]["topk_ids_of_layer"][2, 1, 0] = value
        pack["records"][0].pop("global_physical_count")

    return change


def _same_expert(pack: Pack) -> None:
    record = pack["records"][0]
    record["topk_ids_of_layer"][2, 1, :2] = torch.tensor(np.flatnonzero(foreign.MAPPING[2] == 3))
    record.pop("global_physical_count")


def _set(key: str, value: Any) -> Callable[[Pack], None]:
    return lambda pack: pack["records"][0].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_slot(10), "uses slot 10, expected -1 to 9"),
        (_slot(-2), "uses slot -2"),
        (_slot(-1), "token 1 has no experts in layer 2, expected 2"),
        (_same_expert, "layer 2 gives token 1 the experts .3, 3., expected 2 different ones"),
        (lambda pack: pack["records"][1]["global_physical_count"].add_(1), "contradicts its own global_physical_count"),
        (lambda pack: pack.__setitem__("records", []), "recorder was off"),
        (lambda pack: pack.pop("records"), "use sglang_stat"),
        (lambda pack: pack.pop("last_physical_to_logical_map"), "no tensor 'last_physical_to_logical_map'"),
        (lambda pack: pack["last_physical_to_logical_map"].fill_(1), "do not hold each of the experts 0 to 1"),
        (lambda pack: pack["last_physical_to_logical_map"].sub_(1), "do not hold each of the experts"),
        (_set("topk_ids_of_layer", torch.zeros(4, 4)), "expected whole numbers in 3 dimensions"),
        (_set("topk_ids_of_layer", torch.zeros(3, 4, 8, dtype=torch.int32)), "expected 4 layers"),
        (_set("positions", [0, 1]), "2 positions"),
        (_set("positions", [0, 1, 3, 2]), "gaps in the positions"),
        (_set("extend_seq_lens", [3]), "add up to 3"),
        (_set("extend_seq_lens", [5, -1]), "add up to 4|no list of whole numbers"),
        (_set("forward_mode", 5), "forward_mode 5"),
        (_set("forward_mode", torch.zeros(2)), "in forward_mode -1"),
        (_set("input_ids", None), "no list of whole numbers 'input_ids'"),
    ],
)
def test_a_wrong_recording_is_refused(tmp_path: Path, change: Callable[[Pack], Any], message: str) -> None:
    pack = foreign.recorder_pack()
    change(pack)
    file = foreign.save(tmp_path / "r.pt", pack)
    refused(message, file, "sglang_per_token", {"first_k_dense": 1, "expert_bytes": 9})


class _Code:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


def test_a_pt_file_is_never_run_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    file = foreign.save(tmp_path / "r.pt", foreign.recorder_pack())
    whole = file.read_bytes()
    said = {"first_k_dense": 1, "expert_bytes": 9}
    for part in (whole[: len(whole) // 2], whole[:100], b"", whole[64:], b"\x80\x02}." + bytes(40)):
        file.write_bytes(part)
        refused("not a complete .pt file", file, "sglang_per_token", said)
    foreign.save(file, {"records": [_Code(tmp_path / "ran")]})
    refused("needs .*runs no code", file, "sglang_per_token", said)
    assert not (tmp_path / "ran").exists()
    foreign.save(file, [1, 2])
    refused("holds a list", file, "sglang_stat", {**SHAPE, "top_k": 2})
    foreign.save(file, foreign.stat_pack())
    refused("no tensor 'last_physical", file, "sglang_per_token", said)
    foreign.save(file, foreign.recorder_pack())
    refused("no tensor 'logical_count'", file, "sglang_stat", {**SHAPE, "top_k": 2})


# --- TensorRT-LLM


def test_tensorrt_statistics_become_counts_and_its_raw_ones_a_trace(tmp_path: Path) -> None:
    folder = foreign.write_tensorrt(tmp_path / "stats")
    import_trace([folder], "tensorrt_llm_statistics", tmp_path / "c", settings={"expert_bytes": 1000})
    counts = ExpertCounts(tmp_path / "c")
    assert counts.spec.layer_ids_L == (1, 2, 3) and counts.spec.top_k_L == (2, 2, 2)
    each = [np.stack([np.bincount(ROUTES[n][:, i].ravel(), minlength=8) for i in range(3)]) for n in "ab"]
    assert (counts.counts_WLE.sum(axis=0) == sum(each)).all() and len(counts.counts_WLE) == 4
    made = import_trace([folder], "tensorrt_llm_raw", tmp_path / "t", settings={"expert_bytes": 1000})
    assert (made.requests, made.tokens) == (4 + 3, 11)
    assert any("each iteration of a rank is one request" in note for note in made.notes)
    rows = TokenBatch.concatenate(list(Trace(tmp_path / "t").batches()))
    whole = {tuple(row) for row in rows.experts_TS.tolist()}
    assert whole == {tuple(row.ravel().tolist()) for name in "ab" for row in ROUTES[name]}


def test_wrong_statistics_are_refused(tmp_path: Path) -> None:
    folder = foreign.write_tensorrt(tmp_path / "stats")
    raw, meta = folder / "rank1_raw.safetensors", folder / "meta_info.json"
    said = {"expert_bytes": 1000}
    arrays = load_file(raw)

    def with_array(**changes: np.ndarray | None) -> None:
        made = {key: value for key, value in {**arrays, **changes}.items() if value is not None}
        save_file(made, raw)

    with_array(**{"50_2": arrays["50_2"][:1]})
    refused("shapes .*expected .tokens, 2. in 3", folder, "tensorrt_llm_raw", said)
    with_array(**{"50_2": None})
    refused("some iterations lack layers", folder, "tensorrt_llm_raw", said)
    with_array(**{"50_2": arrays["50_2"] + 8})
    refused("uses expert", folder, "tensorrt_llm_raw", said)
    with_array(**{"50_2": arrays["50_2"].astype(np.float32)})
    refused("has float32 '50_2'", folder, "tensorrt_llm_raw", said)
    with_array(more=arrays["50_2"])
    refused("has int32 'more'", folder, "tensorrt_llm_raw", said)
    raw.write_bytes(raw.read_bytes()[:50])
    refused("not a complete safetensors file", folder, "tensorrt_llm_raw", said)
    save_file({"50_1": np.zeros(9, np.int64)}, folder / "rank0.safetensors")
    refused("has the shape .9,., expected .8,.", folder, "tensorrt_llm_statistics", said)
    for file in folder.glob("rank*.safetensors"):
        file.unlink()
    refused(r"no rank\*.safetensors", folder, "tensorrt_llm_statistics", said)
    for text in ("{", "[]", '{"num_experts": 8, "num_experts_per_token": 9}', '{"num_experts": 8}'):
        meta.write_text(text)
        refused("meta_info.json", folder, "tensorrt_llm_statistics", said)
    with pytest.raises(UsageError, match="no directory at"):
        import_trace([meta], "tensorrt_llm_raw", tmp_path / "t", settings=said)


def test_a_table_of_ktransformers_is_one_pass(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 9, (HIDDEN, EXPERTS)).astype(np.int32)
    counts[0] = 0
    file = foreign.save(tmp_path / "k.pt", {"logical_count": torch.from_numpy(counts)})
    made = import_trace([file], None, tmp_path / "t", settings={"first_k_dense": 1})
    assert made.format == "ktransformers"
    assert (ExpertCounts(tmp_path / "t").counts_WLE == counts[None, 1:]).all()
    export_trace(tmp_path / "t", "ktransformers", tmp_path / "again.pt")
    assert torch.equal(torch.load(tmp_path / "again.pt")["logical_count"], torch.from_numpy(counts))


def test_layers_without_counts_are_named_and_the_advice_works(tmp_path: Path) -> None:
    """DeepSeek V4's first layers choose by token id, so that an engine's recorder counts nothing there."""
    counts = np.random.default_rng(0).integers(1, 9, (2, HIDDEN, EXPERTS))
    counts[:, :2] = 0
    file = foreign.save(tmp_path / "s.pt", {"logical_count": torch.from_numpy(counts)})
    model = import_trace(
        [foreign.write_lines(tmp_path / "r.jsonl", foreign.sglang_native("a"))],
        None,
        tmp_path / "model",
        settings=HEADLESS,
    ).out
    with pytest.raises(MoetoolError, match="--set moe_layers=") as refusal:
        import_trace([file], None, tmp_path / "t", settings={"model": str(model)})
    advised = re.search(r"moe_layers=(\S+?),? ", str(refusal.value))
    assert advised is not None
    import_trace([file], None, tmp_path / "t", settings={"model": str(model), "moe_layers": advised[1]})
    found = ExpertCounts(tmp_path / "t")
    assert found.spec.layer_ids_L == (2, 3) and (found.counts_WLE == counts[:, 2:]).all()
    with pytest.raises(UsageError, match="layer 0"):
        import_trace([file], None, tmp_path / "u", settings={"model": str(model), "moe_layers": "0..3"})


@pytest.mark.parametrize("said", [HEADLESS, {**HEADLESS, "first_k_dense": None}])
def test_the_advice_on_an_unrecorded_layer_of_routes_works(said: dict[str, Any], tmp_path: Path) -> None:
    said = {name: value for name, value in said.items() if value is not None}
    rows = without_layer("a", 1)
    file = foreign.write_lines(tmp_path / "r.jsonl", foreign.sglang_native("a", rows))
    with pytest.raises(MoetoolError, match="--set moe_layers=") as refusal:
        import_trace([file], None, tmp_path / "t", settings=said)
    advised = re.search(r"moe_layers=(\S+?),? ", str(refusal.value))
    assert advised is not None
    said.pop("first_k_dense", None)
    import_trace([file], None, tmp_path / "t", settings={**said, "moe_layers": advised[1]})
    assert Trace(tmp_path / "t").spec.layer_ids_L == (2, 3)
