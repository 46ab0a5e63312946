"""Errors by their facts: the file, value, option or next command that they name, whatever the sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[Exception], *facts: object) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this kind in one line that names every fact, each as a whole word or number."""
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    assert "\n" not in text, text
    for fact in map(str, facts):
        assert re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", text), f"{fact!r} is not named in: {text}"
