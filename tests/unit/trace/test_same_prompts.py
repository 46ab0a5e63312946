"""Requests are identified by their prompts, and by all their rows where the prompt was not recorded or not marked."""

from pathlib import Path

import numpy as np

from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.same_prompts import overlap, prompt_digests
from tests.published_routes import DEEPSEEK, needs_routes


def imported(folder: Path, texts: dict[str, list[int]], tokens_as: str) -> Trace:
    """A trace of one layer, whose routes depend on the token only; every text begins with the same token."""
    rows = ["request,token,layer,expert"]
    for name, text in texts.items():
        rows += [f"{name},{at},0,{expert}" for at, expert in enumerate([0, *text])]
    folder.mkdir()
    (folder / "f.csv").write_text("\n".join(rows) + "\n")
    import_trace(
        [folder / "f.csv"],
        None,
        folder / "t",
        tokens_as=tokens_as,
        settings={"num_experts": 8, "expert_bytes": 10},
    )
    return Trace(folder / "t")


def test_texts_with_the_same_first_token_are_different(tmp_path: Path) -> None:
    trace = imported(tmp_path / "a", {"x": [1, 2, 3], "y": [1, 2, 4], "z": [1, 2, 3]}, "decode")
    known = prompt_digests(trace)
    assert known[0] == known[2] and not known[0] & known[1]
    for tokens_as in ("prefill", "answer"):  # the same texts, imported in another way
        other = imported(tmp_path / tokens_as, {"new": [5, 5], "x": [1, 2, 3]}, tokens_as)
        found = overlap(other, set().union(*known.values()))
        assert found.repeated == {1}
        # a marked prompt may be the beginning of a text that was seen whole
        assert found.undecided == (tokens_as == "prefill")


def test_nothing_is_undecided_between_prompts(tmp_path: Path) -> None:
    a, b = (imported(tmp_path / name, {"x": [1, 2, 3, number]}, "prefill") for number, name in enumerate("ab"))
    found = overlap(b, set().union(*prompt_digests(a).values()))
    assert (found.repeated, found.undecided) == (frozenset(), 0)


@needs_routes
def test_sequences_of_the_published_routes_are_all_different(tmp_path: Path) -> None:
    import_trace([DEEPSEEK / "law.parquet"], None, tmp_path / "law")
    known = prompt_digests(Trace(tmp_path / "law"))
    first = {
        rows.experts_TS[0].tobytes()
        for rows in Trace(tmp_path / "law").whole_requests()
        if np.count_nonzero(rows.iteration_T == 0) == 1
    }
    assert len(known) == 33 and len(first) < 20
    assert len(set(known.values())) == 33
