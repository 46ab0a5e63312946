"""Routes in the shape of another model."""

from pathlib import Path

import numpy as np

from moetool.bench.paper.assumed_machine import AssumedMachine
from moetool.bench.paper.claims import Sizes
from moetool.bench.paper.experiments import policies
from moetool.bench.paper.shaped_routes import shaped
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import Workbench
from moetool.trace.reader import Trace
from tests.refusals import refused
from tests.synthetic_routes import make_spec, write_trace


def test_routes_take_the_shape_of_a_model_with_fewer_experts_a_layer(tmp_path: Path) -> None:
    spec = make_spec(2, 16, 4)
    trace = Trace(write_trace(tmp_path / "scored", spec, num_requests=3, keep=("topk", "logits")))
    bench = Workbench(sizes=Sizes(), machine=AssumedMachine(), work=tmp_path / "work", given={"there": trace.path})
    assert shaped(bench, trace, "") is trace
    mixtral = shaped(bench, trace, "mixtral-8x7b")
    assert (mixtral.spec.num_experts_L, mixtral.spec.top_k_L) == ((8,) * 4, (2,) * 4)
    assert mixtral.spec.total_experts == spec.total_experts and len(mixtral.requests) == 3
    lines = {"MoESys": policies.PolicyLine(policy="moesys")}
    replayed = policies.run(bench, policies.Options(lines=lines, memory=(0.5,), shape="mixtral-8x7b"))
    assert replayed.experts == (8, 2)
    for old, new in zip(trace.batches(["logits"]), mixtral.batches(), strict=True):
        assert old.logits_TF is not None and (old.phase_T == new.phase_T).all()
        for layer in range(4):
            mine_TE = old.logits_TF[:, 8 * layer : 8 * layer + 8].astype(float)
            best_TK = np.take_along_axis(mine_TE, new.experts_TS[:, 2 * layer : 2 * layer + 2].astype(int), axis=1)
            assert (np.sort(best_TK, axis=1) == np.sort(mine_TE, axis=1)[:, -2:]).all()
    odd = Trace(write_trace(tmp_path / "odd", make_spec(2, 12, 4), num_requests=1, keep=("topk", "logits")))
    with refused(CannotTestError, 12, 8):
        shaped(bench, odd, "mixtral-8x7b")
