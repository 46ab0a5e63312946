"""Arrivals of requests at servers: a Poisson process, a fixed pace, or a published request trace."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from moetool.base.config import parse_seconds
from moetool.base.errors import MismatchError, UsageError, first_line

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One arriving request.

    Attributes:
        at_s: seconds since the simulation's start.
        prompt_tokens: number of prompt tokens in the file; None without a file.
        new_tokens: number of new tokens in the file; None without a file.
    """

    at_s: float
    server: int
    prompt_tokens: int | None = None
    new_tokens: int | None = None


def read_arrivals(text: str, busy: list[int], count: int, rng: np.random.Generator, pace: float = 1.0) -> list[Arrival]:
    """Read or draw arrivals in the order of time, the first at or after 0.

    Args:
        text: `poisson:10s` (a Poisson process with this mean gap at each busy server), `every:10s` (a request at all
            busy servers every 10 s), or a file with Azure's (CSV) or Mooncake's (JSON lines) columns. Requests of a
            file go to random busy servers.
        busy: numbers of the servers with requests.
        count: number of arrivals; a file may have fewer.
        pace: gaps are divided by this.

    Raises:
        UsageError: the text is none of these, or there is no such file.
        MismatchError: the file has other columns, or a damaged line.
    """
    kind, colon, gap = text.partition(":")
    if colon and kind in ("poisson", "every"):
        gap_s = parse_seconds(gap) / pace
        if kind == "every":
            return [Arrival(at_s=i // len(busy) * gap_s, server=busy[i % len(busy)]) for i in range(count)]
        # The servers together are one Poisson process whose arrivals go to a random server.
        times = np.cumsum(rng.exponential(gap_s / len(busy), count)).tolist()
        servers = rng.integers(len(busy), size=count).tolist()
        return [Arrival(at_s=at_s, server=busy[n]) for at_s, n in zip(times, servers, strict=True)]
    path = Path(text)
    if not path.is_file():
        raise UsageError(
            f"--arrivals {text!r} is not a file; write poisson:10s, every:10s, or the path of a request trace"
        )
    rows = sorted(row for row, _ in zip(_rows(path), range(count), strict=False))
    if not rows:
        raise MismatchError(f"{path} has no request; download the file again")
    servers = rng.integers(len(busy), size=len(rows)).tolist()
    return [
        Arrival(at_s=(at_s - rows[0][0]) / pace, server=busy[n], prompt_tokens=prompt, new_tokens=new)
        for (at_s, prompt, new), n in zip(rows, servers, strict=True)
    ]


def _rows(path: Path) -> Iterator[tuple[float, int, int]]:
    """Yield (seconds, prompt tokens, new tokens) of each line; at least one token each."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            azure = not file.readline().lstrip().startswith("{")
            file.seek(0)
            columns = _AZURE if azure else _MOONCAKE
            lines = csv.DictReader(file) if azure else (json.loads(line) for line in file if line.strip())
            for line in lines:
                when, prompt, new = (line[column] for column in columns)
                at_s = datetime.fromisoformat(when).timestamp() if azure else float(when) / 1e3
                yield at_s, max(1, int(prompt)), max(1, int(new))
    except (KeyError, TypeError, ValueError) as error:
        raise MismatchError(
            f"{path} is not a request trace ({first_line(error)}), expected the columns {', '.join(_AZURE)} (CSV) or "
            f"{', '.join(_MOONCAKE)} (JSON lines)"
        ) from None
