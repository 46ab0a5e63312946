"""The expert atlas: planted specialists, dead experts and duplicates are found, and counts are those of the trace."""

from pathlib import Path

import numpy as np
import pytest

from moetool.report.atlas import atlas_section, draw_atlas
from moetool.report.sample import ReportOptions, read_routes
from moetool.trace.reader import Trace
from tests import traces

LENGTHS = [(40, 4), (40, 4), (40, 4), (40, 4)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """In layer 1 experts 6 and 7 are always chosen together by the token 77, expert 5 by none."""
    forwards = traces.alone(LENGTHS)
    for rows in forwards:
        draw = np.random.default_rng(len(rows))
        rows.experts_TS = rows.experts_TS.copy()
        rows.token_id_T = draw.integers(0, 9, len(rows)).astype(np.int32)
        for i in range(len(rows)):
            special = i % 3 == 0
            rows.experts_TS[i, :2] = (6, 7) if special else draw.choice(5, 2, replace=False)
            if special:
                rows.token_id_T[i] = 77
    return traces.write(tmp_path_factory.mktemp("atlas") / "t", forwards, LENGTHS)


def test_planted_specialists_dead_experts_and_duplicates_are_found(trace: Trace) -> None:
    atlas = draw_atlas(trace, read_routes(trace, ReportOptions()))
    assert atlas.dead == ((1, 5),)
    assert atlas.duplicates[0] == (1, 6, 7, 1.0) and {pair[:3] for pair in atlas.duplicates} == {(1, 6, 7)}
    six = next(entry for entry in atlas.entries if (entry.layer, entry.expert) == (1, 6))
    rows = np.concatenate([batch.token_id_T for batch in trace.batches()])
    uses = np.concatenate([(batch.experts_TS[:, :2] == 6).any(axis=1) for batch in trace.batches()])
    assert six.uses == uses.sum() and six.tokens[0].name == "77"
    expected = (rows[uses] == 77).mean() / (rows == 77).mean()
    assert six.tokens[0].lift == pytest.approx(expected, abs=1e-3)
    assert sum(entry.uses for entry in atlas.entries) == trace.num_tokens * sum(trace.spec.top_k_L)
    notes = atlas_section(atlas).notes
    assert "1 of 22 experts were never chosen: 1/5" in notes[0] and "1/6 and 1/7" in notes[1]


def test_tokens_are_spelled_by_a_tokenizer(trace: Trace) -> None:
    class Speller:
        def decode(self, ids: list[int]) -> str:
            return f"<{ids[0]}>\n"

    atlas = draw_atlas(trace, read_routes(trace, ReportOptions()), Speller())
    assert any(lift.name == "<77>\\n" for entry in atlas.entries for lift in entry.tokens)


def test_withheld_tokens_leave_tasks(tmp_path: Path) -> None:
    forwards = traces.alone(LENGTHS)
    for rows in forwards:
        rows.token_id_T = np.full(len(rows), -1, np.int32)
    trace = traces.write(tmp_path / "t", forwards, LENGTHS)
    atlas = draw_atlas(trace, read_routes(trace, ReportOptions()))
    assert not any(entry.tokens for entry in atlas.entries) and any(entry.tasks for entry in atlas.entries)
