"""Cost of checking the rows of a trace beside reading them, on 10^5 tokens of 26 layers x 64 experts."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from moetool.base import durable
from moetool.trace.reader import Trace
from moetool.trace.row_checks import RowChecks
from moetool.trace.rows import TokenBatch
from moetool.trace.writer import TraceWriter
from tests.synthetic import make_spec

SPEC = replace(make_spec(layers=26, experts=64, top_k=6), hidden_size=64)
REQUESTS, EACH = 200, 500
ROUNDS = 9


def write(out: Path, together: int, keep: list[str]) -> Trace:
    """A trace of requests of which so many run together."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((EACH, 26, 64)), axis=2)[:, :, :6].reshape(EACH, -1).astype(np.uint16)
    weights = rng.random((EACH, 26 * 6)).astype(np.float16)
    logits = rng.normal(size=(EACH, 26 * 64)).astype(np.float16)
    place_T = np.repeat(np.arange(EACH, dtype=np.int32), together)
    with durable.staged_directory(out) as folder:
        writer = TraceWriter(folder, SPEC, keep)
        for number, first in enumerate(range(0, REQUESTS, together)):
            rows = TokenBatch(
                request_T=np.tile(np.arange(first, first + together, dtype=np.int32), EACH),
                forward_T=number * EACH + place_T,
                phase_T=np.ones(len(place_T), np.uint8),
                iteration_T=place_T,
                position_T=place_T,
                token_id_T=place_T,
                experts_TS=experts[place_T],
                weights_TS=weights[place_T],
                logits_TF=logits[place_T] if "logits" in keep else None,
            )
            writer.append(rows)
        for request in range(REQUESTS):
            facts = {"dataset": "d", "task": "t", "prompt_id": str(request)}
            writer.add_request(request, **facts, prompt_tokens=1, new_tokens=EACH)
        writer.finish(composition={"kind": "batch"}, provenance={})
    return Trace(out)


@pytest.mark.parametrize(
    ("together", "columns"), [(1, ["weights"]), (8, ["weights"]), (8, ["weights", "logits"])], ids=str
)
def test_row_checks(together: int, columns: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa.set_cpu_count(1)
    write(tmp_path / "t", together, ["topk", *columns[1:]])
    spent = 0.0

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: object) -> None:
            nonlocal spent
            began = time.perf_counter()
            method(*arguments)
            spent += time.perf_counter() - began

        return run

    monkeypatch.setattr(RowChecks, "check", timed(RowChecks.check))
    monkeypatch.setattr(RowChecks, "finish", timed(RowChecks.finish))
    shares = []
    for _ in range(ROUNDS):
        spent, began = 0.0, time.perf_counter()
        assert sum(map(len, Trace(tmp_path / "t").batches(columns))) == REQUESTS * EACH
        shares.append(spent / (time.perf_counter() - began - spent))
    print(f"\n{together} together, {'+'.join(columns)}: checks take {100 * np.median(shares):.1f} % of reading")
