"""A trace of the embedded model for the command line to work on."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten prompts of the embedded model, with logits."""
    from moetool.capture.run import CaptureOptions, capture
    from moetool.prompts import gather as prompts

    texts = list(prompts.load(["all"], max_prompts=6))
    options = CaptureOptions(max_new_tokens=8, batch_size=8)
    return capture("reference", texts, tmp_path_factory.mktemp("cli") / "trace", options).out
