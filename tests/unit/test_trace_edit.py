"""A part of a trace is a trace: the same rows, fewer of them."""

from pathlib import Path

import numpy as np
import pytest

from moetool.errors import UsageError
from moetool.trace import TokenBatch
from moetool.trace_edit import head
from tests import traces

LENGTHS = [(4, 3), (2, 2), (5, 1)]
COLUMNS = ("weights", "logits", "hidden")


def test_the_first_layers_and_requests(tmp_path: Path) -> None:
    whole = traces.write(tmp_path / "whole", traces.together(LENGTHS), LENGTHS)
    made = head(whole, tmp_path / "head", layers=2, requests=2)
    spec = made.spec
    assert (spec.num_layers, spec.layer_ids_L, spec.top_k_L) == (2, (1, 2), (2, 2))
    assert spec.revision != whole.spec.revision
    assert "ahead" not in made.columns and made.requests.num_rows == 2
    before = TokenBatch.concatenate(list(whole.batches(COLUMNS)))
    before = before.select(before.request_T < 2)
    after = TokenBatch.concatenate(list(made.batches(COLUMNS)))
    assert np.array_equal(after.experts_TS, before.experts_TS[:, :4])
    for name, width in (("weights_TS", 4), ("logits_TF", 16), ("hidden_TH", 8)):
        assert np.array_equal(getattr(after, name), getattr(before, name)[:, :width])
    assert [row[:2] for row in made.embeddings()] == [row[:2] for row in whole.embeddings() if row[0] < 2]
    assert len(list(made.forwards(sequential=True, columns=["embeddings"]))) == 5


def test_all_layers_keep_the_model(tmp_path: Path) -> None:
    whole = traces.write(tmp_path / "whole", traces.alone(LENGTHS), LENGTHS)
    made = head(whole, tmp_path / "head", requests=1)
    assert made.spec == whole.spec and made.columns == whole.columns and made.ahead == whole.ahead
    assert made.num_tokens == 6


@pytest.mark.parametrize("asked", [{"layers": 0}, {"layers": 4}, {"requests": 4}])
def test_more_than_there_is_is_refused(asked: dict[str, int], tmp_path: Path) -> None:
    whole = traces.write(tmp_path / "whole", traces.alone(LENGTHS), LENGTHS)
    with pytest.raises(UsageError, match=r"--\w+ is \d, and .* has 3; give 1 to 3"):
        head(whole, tmp_path / "head", **asked)
