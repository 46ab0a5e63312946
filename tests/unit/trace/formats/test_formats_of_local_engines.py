"""Files of llama.cpp and colibri: what they say arrives, what they leave out is told or refused."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from moetool.base.errors import MoetoolError, UsageError
from moetool.trace.expert_counts import ExpertCounts
from moetool.trace.foreign.exporting import export_trace
from moetool.trace.foreign.importing import Imported, import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests.synthetic import make_spec, random_experts

LAYER_IDS, EXPERTS, TOP_K, PROMPT, NEW = (1, 2, 3, 4, 5), 16, 2, 12, 4
TOKENS = PROMPT + NEW
ROUTES = random_experts(make_spec(len(LAYER_IDS), EXPERTS, TOP_K), TOKENS, np.random.default_rng(0))
SAID = {"num_experts": EXPERTS, "expert_bytes": 1000}
CHUNKS = (slice(0, 8), slice(8, PROMPT), *(slice(t, t + 1) for t in range(PROMPT, TOKENS)))
"""The forwards of one run: the prompt in two chunks, then token by token."""


def forward_rows(span: slice, *, whole: bool = False) -> list[tuple[int, int]]:
    """(layer, token) as an engine computes them: the last layer for the last token alone, unless `whole`."""
    tokens = range(span.start, span.stop)
    return [(i, t) for i in range(len(LAYER_IDS)) for t in (tokens if whole or i < len(LAYER_IDS) - 1 else tokens[-1:])]


def layer_expert_lines() -> list[str]:
    return [
        f"{LAYER_IDS[i]},{expert}" for span in CHUNKS for i, token in forward_rows(span) for expert in ROUTES[token, i]
    ]


def expected_routes() -> np.ndarray:
    """Prompt tokens that the last layer was not computed for repeat the experts of the next one that it was."""
    routes = ROUTES.copy()
    routes[:7, -1], routes[8:11, -1] = ROUTES[7, -1], ROUTES[11, -1]
    return routes


def rows_of(path: Path, columns: tuple[str, ...] = ()) -> list[TokenBatch]:
    trace = Trace(path)
    trace.verify()
    return list(trace.whole_requests(columns))


def bring(file: Path, format: str | None = None, **said: Any) -> Imported:
    return import_trace([file], format, file.parent / "t", settings={**SAID, **said}, overwrite=True)


def refused(message: str, file: Path, format: str | None, **said: Any) -> None:
    with pytest.raises(MoetoolError, match=message) as refusal:
        import_trace([file], format, file.parent / "refused", settings={**SAID, **said})
    assert "\n" not in str(refusal.value)
    assert not (file.parent / "refused").exists()


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_layer_expert_rows_become_tokens(tmp_path: Path) -> None:
    file = write(tmp_path / "moe_trace.csv", layer_expert_lines())
    made = bring(file)
    assert made.format == "llamacpp_layer_expert" and made.guessed and "layer,expert" in made.guessed
    (rows,) = rows_of(tmp_path / "t")
    assert (rows.experts_TS.reshape(ROUTES.shape) == expected_routes()).all()
    trace = Trace(tmp_path / "t")
    assert trace.spec.layer_ids_L == LAYER_IDS and trace.spec.top_k_L == (TOP_K,) * 5
    assert trace.requests["prompt_tokens"].to_pylist() == [PROMPT]
    assert any("10 prompt tokens have no experts in layer 5" in note for note in made.notes)
    # two runs, one after the other, are two requests
    made = bring(write(file, layer_expert_lines() * 2))
    assert made.requests == 2 and made.tokens == 2 * TOKENS


def test_layer_expert_keeps_the_first_of_tokens_that_were_read_from_a_strided_view(tmp_path: Path) -> None:
    """The first version of moe-trace wrote the ranking of the first token's experts in place of the others'."""
    rng = np.random.default_rng(1)
    ranking = {(i, t): rng.permutation(EXPERTS) for i in range(len(LAYER_IDS)) for t in range(TOKENS)}
    lines = []
    for span in CHUNKS:
        for i, layer in enumerate(LAYER_IDS):
            tokens = range(span.start, span.stop)
            used = tokens if i < len(LAYER_IDS) - 1 else tokens[-1:]
            view = np.concatenate([ranking[i, token] for token in used])  # rows of all experts
            lines += [f"{layer},{expert}" for expert in view[: len(used) * TOP_K]]
    made = bring(write(tmp_path / "old.csv", lines))
    (rows,) = rows_of(tmp_path / "t")
    found = rows.experts_TS.reshape(-1, len(LAYER_IDS), TOP_K)
    kept = [0, 8, *range(PROMPT, TOKENS)]
    assert len(found) == len(kept)
    for row, token in zip(found[:, :-1], kept, strict=True):
        assert [layer.tolist() for layer in row] == [ranking[i, token][:TOP_K].tolist() for i in range(4)]
    assert any("10 prompt tokens are left out" in note for note in made.notes)
    assert Trace(tmp_path / "t").requests["prompt_tokens"].to_pylist() == [2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-1], "expected a multiple of top_k|cut off"),
        (lambda lines: [*lines[:20], *lines[22:]], "expected as many"),
        (lambda lines: [*lines[:5], "1;2", *lines[5:]], "not a CSV of layer,expert"),
        (lambda lines: [*lines[:5], "1,-2", *lines[6:]], "the number -2"),
        (lambda lines: ["1,16", *lines[1:]], "uses expert 16"),
        (lambda lines: [lines[0], lines[0], *lines[2:]], "different ones"),
        (lambda lines: [*lines[:-4], *lines[-2:]], "tokens and layer 1 1, expected as many"),
        (lambda lines: [], "not a CSV|no rows"),
    ],
)
def test_damaged_layer_expert_files_are_refused(
    tmp_path: Path, change: Callable[[list[str]], list[str]], message: str
) -> None:
    file = write(tmp_path / "m.csv", change(layer_expert_lines()))
    refused(message, file, "llamacpp_layer_expert", top_k=TOP_K)


def profile_lines() -> list[str]:
    lines = []
    for span in CHUNKS:
        for i, token in forward_rows(span):
            pos = token - PROMPT if token >= PROMPT else -(span.stop - (token - span.start))
            lines.append(",".join(map(str, [pos, LAYER_IDS[i], *ROUTES[token, i]])))
    return lines


def test_moe_profiles_mark_the_prompt(tmp_path: Path) -> None:
    file = write(tmp_path / "p.csv", profile_lines() * 2)  # two runs in one file
    made = bring(file)
    assert made.format == "llamacpp_moe_profile" and made.requests == 2
    for rows in rows_of(tmp_path / "t"):
        assert (rows.experts_TS.reshape(ROUTES.shape) == expected_routes()).all()
    refused("not a CSV of pos,layer", write(tmp_path / "q.csv", [*profile_lines(), "7"]), "llamacpp_moe_profile")


def usage_lines() -> list[str]:
    counts = np.zeros((6, EXPERTS), np.int64)
    for i, layer in enumerate(LAYER_IDS):
        np.add.at(counts[layer], ROUTES[:, i].ravel(), 1)
    header = ["-1 6 16", f"-2 1 {fnv1a('olmoe')}"]
    return header + [
        f"{layer} {e} {counts[layer, e]}" for layer in range(6) for e in range(EXPERTS) if counts[layer, e]
    ]


def fnv1a(text: str) -> int:
    value = 0x811C9DC5
    for letter in text:
        value = ((value ^ ord(letter)) * 0x01000193) & 0xFFFFFFFF
    return value


def counted() -> np.ndarray:
    counts = np.zeros((len(LAYER_IDS), EXPERTS), np.int64)
    for i in range(len(LAYER_IDS)):
        np.add.at(counts[i], ROUTES[:, i].ravel(), 1)
    return counts


def test_coli_usage_counts_by_expert(tmp_path: Path) -> None:
    file = write(tmp_path / ".coli_usage", usage_lines())
    made = bring(file, top_k=TOP_K)
    assert (made.format, made.kind, made.tokens) == ("coli_usage", "counts", TOKENS)
    counts = ExpertCounts(tmp_path / "t")
    assert counts.spec.layer_ids_L == LAYER_IDS and (counts.counts_WLE[0] == counted()).all()
    assert any("written by olmoe" in note for note in made.notes)
    # without header lines, as of before them
    write(file, usage_lines()[2:])
    with pytest.raises(UsageError, match=r"lacks num_experts and top_k .* --set num_experts=NUMBER --set top_k=NUMBER"):
        import_trace([file], "coli_usage", tmp_path / "refused")
    bring(file, top_k=TOP_K)
    assert (ExpertCounts(tmp_path / "t").counts_WLE[0] == counted()).all()
    # inkling's dense layout, and back out
    dense = np.zeros((6, EXPERTS), "<u4")
    dense[list(LAYER_IDS)] = counted()
    file.write_bytes(b"IKU1" + struct.pack("<II", 6, EXPERTS) + dense.tobytes())
    bring(file, top_k=TOP_K)
    assert (ExpertCounts(tmp_path / "t").counts_WLE[0] == counted()).all()
    export_trace(tmp_path / "t", "coli_usage", tmp_path / "out")
    assert (tmp_path / "out").read_text().splitlines() == usage_lines()[2:]
    file.write_bytes(file.read_bytes()[:-4])
    refused("expected 396 for 6 layers", file, "coli_usage", top_k=TOP_K)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:-1], lines[-1].rsplit(" ", 1)[0]], "cut off"),
        (lambda lines: ["-1 6 16", "-2 2 7", *lines[2:]], "of version 2"),
        (lambda lines: ["-1 3 16", *lines[1:]], "counts layer 5"),
        (lambda lines: [*lines, lines[-1]], "an expert twice"),
        (lambda lines: ["-1 6 8", *lines[1:]], "counts expert"),
        (lambda lines: lines[:2], "counts nothing"),
        (lambda lines: [], "empty"),
    ],
)
def test_damaged_coli_usage_is_refused(tmp_path: Path, change: Callable[[list[str]], list[str]], message: str) -> None:
    refused(message, write(tmp_path / "u", change(usage_lines())), "coli_usage", top_k=TOP_K, num_experts=EXPERTS)


def route_trace_lines(*, draft: bool = False) -> list[str]:
    """One prompt of 12 rows in a forward, then token by token; a draft head's layer 6 follows, if asked for."""
    lines, call = [], 0
    for span in (slice(0, PROMPT), *CHUNKS[2:]):
        for i, layer in enumerate([*LAYER_IDS, *([6] if draft else [])]):
            for row, token in enumerate(range(span.start, span.stop)):
                chosen = ROUTES[token, min(i, 4)]
                lines.append(f"{call} {row} {layer} {chosen[0]}:0.6250 {chosen[1]}:0.3750")
            call += 1
    return lines


def test_route_trace_of_colibri(tmp_path: Path) -> None:
    file = write(tmp_path / "route.txt", route_trace_lines())
    made = bring(file)
    assert made.format == "coli_route_trace"
    (rows,) = rows_of(tmp_path / "t", ("weights",))
    assert rows.weights_TS is not None and (rows.weights_TS.reshape(-1, 2) == [0.625, 0.375]).all()
    assert (rows.experts_TS.reshape(ROUTES.shape) == ROUTES).all()
    trace = Trace(tmp_path / "t")
    assert trace.requests["prompt_tokens"].to_pylist() == [PROMPT] and trace.spec.renormalize
    assert trace.manifest["composition"] == {"kind": "log"}
    export_trace(tmp_path / "t", "coli_route_trace", tmp_path / "out")
    assert (tmp_path / "out").read_text() == file.read_text()
    # the draft head's rows go where the model's layers are said
    drafts = write(tmp_path / "draft.txt", route_trace_lines(draft=True))
    made = bring(drafts, num_hidden_layers=6)
    assert any("rows of a draft head" in note for note in made.notes)
    assert (rows_of(tmp_path / "t")[0].experts_TS.reshape(ROUTES.shape) == ROUTES).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:3], *lines[4:]], "out of order"),
        (lambda lines: lines[1:], "out of order"),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], "line 80 is"),
        (lambda lines: [*lines[:-1], lines[-1].replace("0.6250", "nan")], "not finite|line"),
        (lambda lines: lines[12:], "tokens"),
        (lambda lines: [], "no lines"),
    ],
)
def test_damaged_route_traces_are_refused(
    tmp_path: Path, change: Callable[[list[str]], list[str]], message: str
) -> None:
    refused(message, write(tmp_path / "r", change(route_trace_lines())), "coli_route_trace")


def write_imatrix(path: Path, counts: dict[str, np.ndarray], kind: str = "imatrix") -> Path:
    """A file by the format's own library, laid out as llama-imatrix lays it out."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["calibration.txt"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", TOKENS)
    for name, values in counts.items():
        writer.add_tensor(f"{name}.in_sum2", np.ones((len(values), 8), np.float32))
        writer.add_tensor(f"{name}.counts", np.asarray(values, np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def imatrix_counts() -> dict[str, np.ndarray]:
    counts = {"blk.0.ffn_up.weight": np.array([TOKENS])}
    for i, layer in enumerate(LAYER_IDS):
        counts[f"blk.{layer}.attn_q.weight"] = np.array([TOKENS])
        for part in ("gate", "up", "down"):
            counts[f"blk.{layer}.ffn_{part}_exps.weight"] = counted()[i]
    return counts


def test_imatrix_counts_by_expert(tmp_path: Path) -> None:
    file = write_imatrix(tmp_path / "imatrix.gguf", imatrix_counts())
    made = import_trace([file], None, tmp_path / "t", settings={"expert_bytes": 1000})
    assert (made.format, made.tokens) == ("llamacpp_imatrix", TOKENS)
    counts = ExpertCounts(tmp_path / "t")
    assert (counts.spec.layer_ids_L, counts.spec.top_k_L) == (LAYER_IDS, (TOP_K,) * 5)
    assert (counts.counts_WLE[0] == counted()).all()


def test_imatrix_files_without_counts_are_refused(tmp_path: Path) -> None:
    dense = {name: values for name, values in imatrix_counts().items() if "exps" not in name}
    refused("is the model an MoE", write_imatrix(tmp_path / "a.gguf", dense), "llamacpp_imatrix")
    alike = {name: np.full_like(values, 3) for name, values in imatrix_counts().items()}
    refused("same count for all its 16 experts", write_imatrix(tmp_path / "b.gguf", alike), None)
    refused("of the type 'model'", write_imatrix(tmp_path / "c.gguf", imatrix_counts(), "model"), "llamacpp_imatrix")
    whole = write_imatrix(tmp_path / "d.gguf", imatrix_counts())
    whole.write_bytes(whole.read_bytes()[:-3000])
    refused("not a complete GGUF file", whole, "llamacpp_imatrix")
    # the older layout: entries, then for each the name, calls, values; calls of the file and the data set's name
    name, values = b"blk.1.ffn_gate_exps.weight", np.ones(16, "<f4")
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii", 1, len(values)) + values.tobytes()
    (tmp_path / "imatrix.dat").write_bytes(struct.pack("<i", 1) + entry + struct.pack("<ii", 1, 3) + b"txt")
    refused("older .dat layout .*does not count experts", tmp_path / "imatrix.dat", None)
