"""The command line in this process, and a trace of the embedded model for it to work on."""

from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Run, exit_code

STARTING = "moetool: starting\n"
"""Printed on a busy machine, where a command has said nothing for a while."""


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; gives exit code, stdout and stderr.

    The arguments come after the words of the module's `COMMAND`, where it has one.
    """
    command: tuple[str, ...] = getattr(request.module, "COMMAND", ())

    def call(*args: Any) -> tuple[int, str, str]:
        code = exit_code(monkeypatch, *command, *args)
        captured = capsys.readouterr()
        return code, captured.out, captured.err.removeprefix(STARTING)

    return call


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten prompts of the embedded model, with logits."""
    from moetool.capture.run import CaptureOptions, capture
    from moetool.prompts import gather as prompts

    texts = list(prompts.load(["all"], max_prompts=6))
    options = CaptureOptions(max_new_tokens=8, batch_size=8, dtype="float32")
    return capture("reference", texts, tmp_path_factory.mktemp("cli") / "trace", options).out
