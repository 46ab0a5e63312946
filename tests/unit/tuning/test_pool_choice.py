"""The form of the pool that a cache plan chooses, against replays of every form."""

from pathlib import Path

import pytest

from moetool.base.errors import UsageError
from moetool.caching.layer_slots import SHARES, equal_slots
from moetool.trace.reader import Trace
from moetool.tuning.candidates import Candidates, best
from moetool.tuning.pool_choice import PoolChoice, divide
from moetool.tuning.replay import ReplaySetup, replay
from tests.refusals import refused
from tests.synthetic import make_spec, write_trace

BUDGET = 12_000
USED = frozenset({0, 2, 4})


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path: Path = tmp_path_factory.mktemp("traces") / "t"
    return write_trace(path, make_spec(), num_requests=6)


@pytest.mark.parametrize("pool", ["one", *SHARES, "auto"])
def test_the_best_of_the_allowed_forms_is_chosen(trace: Trace, pool: str) -> None:
    names = ["lru", "lfu"]
    field = Candidates(trace, USED, frozenset({1, 3, 5}), names=names)
    chosen = divide(field, BUDGET, PoolChoice(row=field.winners([BUDGET])[BUDGET]), pool)
    forms = {"one": ["one"], "auto": ["one", *SHARES]}.get(pool, [pool])
    tried = {
        form: replay(trace, names, [BUDGET], ReplaySetup(requests=USED, pool=form, pool_unit="slots")) for form in forms
    }
    fewest = best([row for rows in tried.values() for row in rows])
    assert chosen.row.bytes_per_decode_token == fewest.bytes_per_decode_token
    allowed = {() if form == "one" else equal_slots(trace.spec, 12, SHARES[form]) for form in forms}
    assert chosen.layer_slots in allowed
    assert chosen.replay(field, USED) == chosen.row


def test_an_unknown_form_is_refused(trace: Trace) -> None:
    field = Candidates(trace, USED, frozenset({1, 3, 5}), names=["lru"])
    with refused(UsageError, "layered", "layer"):
        divide(field, BUDGET, PoolChoice(row=field.winners([BUDGET])[BUDGET]), "layered")
