"""Time and seeds of `make fuzz`.

make fuzz                          ten minutes, shared by all tests that ask for `fuzz_seconds`
MOETOOL_FUZZ_MINUTES=1 make fuzz
MOETOOL_FUZZ_SEED=7 make fuzz      the same cases again
"""

import os
import random

import pytest

MINUTES = float(os.environ.get("MOETOOL_FUZZ_MINUTES", "10"))


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    """How long one test may look for cases."""
    sharing = [item for item in request.session.items if "fuzz_seconds" in getattr(item, "fixturenames", ())]
    return 60 * MINUTES / len(sharing)


@pytest.fixture
def fuzz_seed() -> int:
    """The seed of the first round; the next ones count on from it. Printed, so that a failure can be seen again."""
    seed = int(os.environ.get("MOETOOL_FUZZ_SEED") or random.randrange(2**31))
    print(f"\nMOETOOL_FUZZ_SEED={seed}")
    return seed
