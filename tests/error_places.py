"""Places of errors: module and function of each MoetoolError that is made."""

import contextlib
import inspect
from collections.abc import Iterator

import pytest

from moetool.base.errors import MoetoolError


@contextlib.contextmanager
def noted_places() -> Iterator[set[str]]:
    """Note the places of all errors made meanwhile, in this process."""
    places: set[str] = set()
    init = MoetoolError.__init__

    def noted(self: MoetoolError, message: str = "") -> None:
        init(self, message)
        frame = inspect.currentframe()
        while frame is not None and frame.f_locals.get("self") is self:  # also in __init__ of a subclass
            frame = frame.f_back
        assert frame is not None
        places.add(f"{frame.f_globals['__name__']} {frame.f_code.co_qualname}".replace(".<locals>", ""))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoetoolError, "__init__", noted)
        yield places
