"""Shared fixtures: one thread, no network, the embedded model."""

import gc
import logging
import os
import shutil
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HOME", os.path.expanduser("~/.cache/huggingface"))  # noqa: PTH111
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="moetool-tests-")  # the user's cache folder

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")
torch.set_num_threads(1)  # sums are compared bit by bit; more threads may add in another order


def pytest_unconfigure() -> None:
    """Remove the user's cache folder."""
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Exclude objects of torch and transformers from garbage collection."""
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Also exclude objects of later imports: after tests that import much, and after a file's own fixtures."""
    if nextitem is not None and (nextitem.path != item.path or len(sys.modules) > _loaded + 100):
        gc.collect()
        _freeze()


_loaded = 0
"""Number of modules at the last freeze."""


def _freeze() -> None:
    global _loaded
    gc.freeze()
    _loaded = len(sys.modules)


@pytest.fixture(autouse=True)
def _logs_of_one_test() -> Iterator[None]:
    """Restore log levels, which a command sets for the whole process and its children."""
    yield
    os.environ.pop("MOETOOL_LOG", None)
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "moetool"]:
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.getLogger("moetool").propagate = True


@pytest.fixture(autouse=True)
def _provokes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Require the errors whose advice a test is marked to follow."""
    marked = {mark.args[0] for mark in request.node.iter_markers("follows")}
    if not marked:
        yield
        return
    from tests.error_places import noted_places

    with noted_places() as places:
        yield
    assert marked <= places, places


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of the embedded model."""
    from moetool.models.files.location import locate

    return locate("reference")


@pytest.fixture(scope="session")
def tokenizer(reference: Path) -> Any:
    """The embedded model's tokenizer."""
    from moetool.models.checkpoint import Checkpoint

    return Checkpoint.open(reference).tokenizer


@pytest.fixture(scope="session")
def full(reference: Path) -> Any:
    """The plain transformers model in float32, with all experts."""
    from moetool.models.checkpoint import Checkpoint
    from moetool.models.loading import load_full

    return load_full(Checkpoint.open(reference), torch.float32)


@pytest.fixture
def lazy(reference: Path) -> Iterator[Any]:
    """The model with its experts on disk, in float32."""
    from moetool.models.checkpoint import Checkpoint
    from moetool.models.loading import load_lazy

    loaded = load_lazy(Checkpoint.open(reference), torch.float32)
    yield loaded
    loaded.files.shards.close()


@pytest.fixture(scope="session")
def predictor(reference: Path) -> Any:
    """An affinity predictor of the embedded model, counted on synthetic routes."""
    import numpy as np

    from moetool.models.checkpoint import Checkpoint
    from moetool.training.predictor import build
    from moetool.training.tokens import Tokens

    made = build("affinity", Checkpoint.open(reference).spec)
    routes = np.random.default_rng(0).integers(0, 32, (500, 8, 4))
    made.count(Tokens(experts_TPK=torch.from_numpy(routes)))
    return made.eval()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The warnings and errors that moetool logs, at the default level."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("moetool"), Lines()
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)
