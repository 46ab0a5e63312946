"""Arrays of experts in every container."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from moetool.base.errors import MismatchError, MoetoolError
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests.foreign import EXPERTS, ROUTES, TOKENS
from tests.refusals import refused

A = ROUTES["a"]  # [7, 3, 2]


def rows_of(folder: Path) -> list[TokenBatch]:
    trace = Trace(folder)
    trace.check()
    return list(trace.whole_requests(trace.columns & {"weights"}))


def write(path: Path, form: str, pack: dict[str, Any]) -> Path:
    if form == "npz":
        np.savez(path.with_suffix(".npz"), **pack)
        return path.with_suffix(".npz")
    if form == "safetensors":
        save_file({name: np.ascontiguousarray(array) for name, array in pack.items()}, path)
    else:
        torch.save({name: torch.from_numpy(np.asarray(array)) for name, array in pack.items()}, path)
    return path


@pytest.mark.parametrize("form", ["npz", "safetensors", "pt"])
def test_experts_with_weights_ids_and_prompts(tmp_path: Path, form: str) -> None:
    weights = np.tile(np.float32([0.75, 0.25]), (*A.shape[:2], 1))
    ids = np.arange(100, 100 + TOKENS["a"])
    pack = {"topk_ids": A.astype(np.int64), "topk_weights": weights, "input_ids": ids, "prompt_length": np.array([4])}
    made = import_trace([write(tmp_path / "f", form, pack)], None, tmp_path / "t", settings={"num_experts": EXPERTS})
    assert made.format == "expert_arrays"
    (rows,) = rows_of(tmp_path / "t")
    assert (rows.experts_TS.reshape(A.shape) == A).all() and rows.token_id_T.tolist() == ids.tolist()
    assert rows.weights_TS is not None and (rows.weights_TS.reshape(-1, 2) == [0.75, 0.25]).all()
    assert rows.phase_T.tolist() == [0, 0, 0, 0, 1, 1, 1]


def layers_first(folder: Path) -> Path:
    np.save(folder / "f.npy", A.transpose(1, 0, 2))
    return folder / "f.npy"


def one_by_one(folder: Path) -> Path:
    np.savez(folder / "f.npz", **{f"model.layers.{i + 1}.topk": A[:, i] for i in range(3)})
    return folder / "f.npz"


def listed(folder: Path) -> Path:
    torch.save({"selected_experts": tuple(torch.from_numpy(A[:, i].copy()) for i in range(3))}, folder / "f.pt")
    return folder / "f.pt"


def masked(folder: Path) -> Path:
    mask = np.zeros((*A.shape[:2], EXPERTS), bool)
    np.put_along_axis(mask, A.astype(np.int64), True, axis=2)
    np.save(folder / "f.npy", mask)
    return folder / "f.npy"


@pytest.mark.parametrize("form", [layers_first, one_by_one, listed, masked])
def test_other_layouts_hold_the_same_routes(tmp_path: Path, form: Any) -> None:
    said: dict[str, Any] = {} if form in (one_by_one, masked) else {"num_experts": EXPERTS, "moe_layers": "1..3"}
    import_trace([form(tmp_path)], None, tmp_path / "t", settings=said)
    trace = Trace(tmp_path / "t")
    assert trace.spec.layer_ids_L == ((0, 1, 2) if form is masked else (1, 2, 3))
    (rows,) = rows_of(tmp_path / "t")
    assert (np.sort(rows.experts_TS.reshape(A.shape), axis=2) == np.sort(A, axis=2)).all()


def test_blanks_of_a_padded_batch_are_left_out_and_counted(tmp_path: Path) -> None:
    padded = np.full((2, 9, 4, 2), -1, np.int32)  # two sequences, layer 0 without experts
    padded[0, 2:, 1:] = A  # left padding
    padded[1, :4, 1:] = ROUTES["b"]
    np.savez(tmp_path / "f.npz", routed_experts=padded)
    made = import_trace([tmp_path / "f.npz"], None, tmp_path / "t")
    assert any(note.startswith("7 tokens") for note in made.notes)
    trace = Trace(tmp_path / "t")
    assert trace.spec.layer_ids_L == (1, 2, 3)
    for name, rows in zip("ab", rows_of(tmp_path / "t"), strict=True):
        assert (rows.experts_TS.reshape(ROUTES[name].shape) == ROUTES[name]).all()
        assert rows.position_T.tolist() == list(range(TOKENS[name]))


class Odd:
    pass


@pytest.mark.parametrize(
    "content",
    [
        np.full((3, 2, 2), 5),  # twice the same expert
        np.array([[[-1, 3]], [[1, 2]]]),  # half a blank
        np.zeros((0, 3, 2), np.int64),
        np.zeros((2, 2, 2, 2, 2), np.int64),
        np.array([Odd()], dtype=object),
    ],
)
def test_wrong_arrays_are_refused_in_one_line(tmp_path: Path, content: np.ndarray) -> None:
    np.save(tmp_path / "f.npy", content, allow_pickle=True)
    with refused(MoetoolError, "f.npy") as refusal:
        import_trace([tmp_path / "f.npy"], "expert_arrays", tmp_path / "t")
    assert "\n" not in str(refusal.value) and not (tmp_path / "t").exists()


@pytest.mark.parametrize("form", ["npz", "safetensors", "pt"])
def test_half_a_file_is_refused_in_one_line(tmp_path: Path, form: str) -> None:
    file = write(tmp_path / "f", form, {"topk_ids": A.astype(np.int64)})
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(MoetoolError, match=file.name) as refusal:
        import_trace([file], "expert_arrays", tmp_path / "t")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["f.npy", "f.npz", "f.pt"])
def test_a_table_of_numbers_is_no_routes(tmp_path: Path, name: str) -> None:
    """Counts [L, E] and token ids [B, T] are whole numbers too."""
    counts = np.random.default_rng(0).integers(0, 5000, (5, 8))
    saves: dict[str, Any] = {"f.npy": np.save, "f.npz": lambda path, made: np.savez(path, counts=made)}
    saves.get(name, lambda path, made: torch.save(torch.from_numpy(made), path))(tmp_path / name, counts)
    for format in (None, "expert_arrays"):
        with pytest.raises(MoetoolError, match=name):
            import_trace([tmp_path / name], format, tmp_path / "t")


def test_a_table_with_the_name_of_experts_is_one_layer(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", topk_ids=A[:, 0])
    import_trace([tmp_path / "f.npz"], None, tmp_path / "t", settings={"num_experts": EXPERTS})
    (rows,) = rows_of(tmp_path / "t")
    assert (rows.experts_TS == A[:, 0]).all()


def test_a_prompt_begins_after_the_padding_at_its_left(tmp_path: Path) -> None:
    experts = np.zeros((2, 10, 3, 2), np.int64)
    experts[..., 1] = 1
    experts[0, 3:], experts[1, :4] = A, ROUTES["b"]
    mask = np.zeros((2, 10), np.int64)
    mask[0, 3:], mask[1, :4] = 1, 1
    np.savez(tmp_path / "f.npz", routed_experts=experts, attention_mask=mask, prompt_lengths=[2, 3])
    made = import_trace([tmp_path / "f.npz"], None, tmp_path / "t", settings={"num_experts": EXPERTS})
    assert not any("prompt not recorded" in note for note in made.notes)
    for name, prompt, rows in zip("ab", (2, 3), rows_of(tmp_path / "t"), strict=True):
        assert (rows.experts_TS.reshape(ROUTES[name].shape) == ROUTES[name]).all()
        assert (rows.phase_T == 0).tolist() == [i < prompt for i in range(TOKENS[name])]


def _padded() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Experts, ids and mask of two sequences, the first with three columns of padding at its left."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((2, 10, 3, EXPERTS)), axis=-1)[..., :2]
    ids = np.arange(20).reshape(2, 10)
    mask = np.ones((2, 10), np.int64)
    ids[0, :3], mask[0, :3] = 7, 0
    return experts, ids, mask


@pytest.mark.parametrize("at_right", [False, True])
@pytest.mark.parametrize("beside", ["input_ids", "prompt_lengths"])
def test_padding_that_cannot_be_told_is_said_and_a_mask_tells_it(beside: str, at_right: bool, tmp_path: Path) -> None:
    experts, ids, mask = (part[:, ::-1] if at_right else part for part in _padded())
    more = {"input_ids": ids} if beside == "input_ids" else {"prompt_lengths": [2, 5]}
    np.savez(tmp_path / "f.npz", routed_experts=experts, **more)
    with refused(MismatchError, tmp_path / "f.npz", "attention_mask"):
        import_trace([tmp_path / "f.npz"], None, tmp_path / "t", settings={"num_experts": EXPERTS})
    np.savez(tmp_path / "f.npz", routed_experts=experts, attention_mask=mask, **more)
    made = import_trace([tmp_path / "f.npz"], None, tmp_path / "t", settings={"num_experts": EXPERTS})
    assert made.tokens == 17


def test_blank_rows_tell_the_padding_and_equal_prompts_have_none(tmp_path: Path) -> None:
    experts, ids, mask = _padded()
    blank = np.where(mask[..., None, None] == 1, experts, -1)
    np.savez(tmp_path / "blank.npz", routed_experts=blank, prompt_lengths=[2, 5])
    import_trace([tmp_path / "blank.npz"], None, tmp_path / "b", settings={"num_experts": EXPERTS})
    for length, prompt, rows in zip((7, 10), (2, 5), rows_of(tmp_path / "b"), strict=True):
        assert (rows.phase_T == 0).tolist() == [i < prompt for i in range(length)]
    ids[0] += 100
    ids[0, :2] = 1, 2
    for name, more in (("ids", {"input_ids": ids}), ("same", {"prompt_lengths": [4, 4]}), ("bare", {})):
        np.savez(tmp_path / f"{name}.npz", routed_experts=experts, **more)
        made = import_trace([tmp_path / f"{name}.npz"], None, tmp_path / name, settings={"num_experts": EXPERTS})
        assert made.tokens == 20 and any("attention_mask" in note for note in made.notes)
    np.savez(tmp_path / "mask.npz", routed_experts=experts, attention_mask=np.ones_like(mask))
    made = import_trace([tmp_path / "mask.npz"], None, tmp_path / "mask", settings={"num_experts": EXPERTS})
    assert made.tokens == 20 and not any("attention_mask" in note for note in made.notes)


def test_one_sequence_may_begin_with_a_token_twice(tmp_path: Path) -> None:
    experts, ids, _ = _padded()
    np.savez(tmp_path / "f.npz", routed_experts=experts[:1], input_ids=ids[:1], prompt_lengths=[4])
    assert import_trace([tmp_path / "f.npz"], None, tmp_path / "t", settings={"num_experts": EXPERTS}).tokens == 10
