"""A minimal worker in a module that Ray's processes can import."""

import os
import time
from pathlib import Path

from moetool.base.errors import MismatchError


class Worker:
    """Answers, fails, sleeps or ends on request."""

    def __init__(self, name: str) -> None:
        if name == "wrong":
            raise MismatchError("found a, expected b; do c")
        if name.startswith("/"):
            Path(name).touch()
            time.sleep(600)
        self.name = name

    def say(self, word: str) -> str:
        return f"{self.name}: {word}"

    def fail(self) -> None:
        raise MismatchError("found x")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def end(self) -> None:
        os._exit(3)

    def drain(self) -> None:
        if self.name == "busy":
            time.sleep(600)

    def close(self) -> None: ...


def build(name: str) -> Worker:
    """Build a worker of that name; `wrong` fails, and a path is made and never built."""
    return Worker(name)
