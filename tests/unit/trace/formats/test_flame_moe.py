"""FLAME-MoE's folder of layers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.base.errors import MoetoolError
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from tests.foreign import EXPERTS, ROUTES, TOKENS
from tests.refusals import refused


def write(folder: Path, *, samples: bool = True) -> Path:
    """As `actives/STEP/LAYER/NAME.pt` and `samples/NAME.pt`, which FLAME-MoE uploads."""
    step = folder / "actives" / "11029"
    for name in "ab":
        for layer in range(3):
            chosen = torch.from_numpy(ROUTES[name][:, layer].astype(np.int64))
            weights = torch.tensor([[0.5, 0.25]] * len(chosen))
            probabilities = torch.zeros(TOKENS[name], EXPERTS).scatter(1, chosen, weights)
            (step / str(layer + 2)).mkdir(parents=True, exist_ok=True)
            torch.save(probabilities, step / str(layer + 2) / f"{name}.pt")
        if samples:
            (folder / "samples").mkdir(exist_ok=True)
            torch.save(torch.arange(TOKENS[name]) + 30, folder / "samples" / f"{name}.pt")
    return step


@pytest.mark.parametrize("samples", [True, False])
def test_layers_of_a_checkpoint_arrive(tmp_path: Path, samples: bool) -> None:
    made = import_trace([write(tmp_path, samples=samples)], None, tmp_path / "t")
    assert (made.format, made.requests) == ("flame_moe", 2)
    trace = Trace(tmp_path / "t")
    trace.check()
    assert trace.spec.layer_ids_L == (1, 2, 3)  # Megatron counts from 1
    for name, rows in zip("ab", trace.whole_requests(["weights"]), strict=True):
        found = np.sort(rows.experts_TS.reshape(ROUTES[name].shape), axis=2)
        assert (found == np.sort(ROUTES[name], axis=2)).all()
        assert rows.weights_TS is not None and sorted(set(rows.weights_TS.ravel().tolist())) == [0.25, 0.5]
        assert rows.token_id_T.tolist() == [30 + i if samples else -1 for i in range(TOKENS[name])]


def test_a_missing_or_other_file_is_named(tmp_path: Path) -> None:
    step = write(tmp_path)
    first = (step / "2" / "b.pt").rename(tmp_path / "b.pt")
    with refused(MoetoolError, "2/b.pt"):
        import_trace([step], None, tmp_path / "t")
    first.rename(step / "2" / "b.pt")
    (step / "3" / "b.pt").unlink()
    with refused(MoetoolError, "3/b.pt"):
        import_trace([step], None, tmp_path / "t")
    torch.save(torch.zeros(2, EXPERTS), step / "3" / "b.pt")
    with refused(MoetoolError, "b.pt"):
        import_trace([step], None, tmp_path / "t")
    torch.save(torch.zeros(2, 3, dtype=torch.int64), step / "3" / "b.pt")
    with refused(MoetoolError, "3/b.pt"):
        import_trace([step], None, tmp_path / "t")
