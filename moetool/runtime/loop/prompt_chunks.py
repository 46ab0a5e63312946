"""Sizes of prompt chunks for which requests that decode wait."""

import math
from statistics import linear_regression
from typing import NamedTuple

LEAST_WAITED_CHUNK = 64
"""Fewest prompt tokens of a forward that other requests wait for: each forward may need every expert."""
_FIRST_CHUNK = 256  # before the time of a token is known
_REMEMBERED = 32  # newest forwards that count: caches fill and contexts grow


class _Forward(NamedTuple):
    """Number of a forward, its prompt tokens, its seconds, and its seconds without waits for experts."""

    number: int
    tokens: int
    took_s: float
    computed_s: float

    def agrees(self, now: "_Forward") -> bool:
        """Whether it is recent, and more tokens took longer."""
        recent = now.number - self.number < _REMEMBERED
        return recent and (self.tokens - now.tokens) * (self.took_s - now.took_s) > 0


class PromptChunks:
    """Chooses how many prompt tokens a forward has, so that requests that decode wait no longer than a limit.

    A forward has a fixed time, in which experts are loaded and their weights read, and a time per token. The newest
    forward's wait for experts is part of the fixed time. The rest of both follows by least squares from the newest
    forwards of different sizes. Forwards that the newest one contradicts do not count: they took longer with fewer
    tokens, or less with more. If only the newest one counts, or the fit is not plausible, its other time is per token.

    Where the fixed time alone is more than half of the limit, a chunk's tokens take as long as the fixed time: decoding
    requests then wait longer, and the prompt takes at most about twice as long as in one forward. After a forward that
    took longer than the limit and than twice the fixed time, no chunk has more tokens than that forward, with one
    exception: if only forwards of the fewest tokens are remembered, one of twice as many shows the fixed time.

    Args:
        max_wait_s: limit (0: none).
        most: tokens of a full chunk.
    """

    def __init__(self, max_wait_s: float, most: int) -> None:
        self._max_wait_s, self._most = max_wait_s, most
        self._tokens = min(_FIRST_CHUNK, most)
        self._fixed_s = math.inf  # as known before a forward
        self._number = 0
        self._newest: dict[int, _Forward] = {}  # by magnitude of the tokens

    def tokens(self, *, decoding: bool) -> int:
        """Most prompt tokens of the next forward; a full chunk if no request decodes or there is no limit."""
        return self._tokens if decoding and self._max_wait_s > 0 else self._most

    def observe(self, num_tokens: int, took_s: float, stalled_s: float) -> None:
        """Learn from a forward with this number of prompt tokens, whether or not a request waited for it.

        Args:
            stalled_s: seconds of it spent waiting for experts.
        """
        if not num_tokens or num_tokens < min(LEAST_WAITED_CHUNK, self._tokens) // 2:
            return  # a decode step, or the end of a prompt
        fixed_s = min(stalled_s, took_s)
        now = _Forward(self._number, num_tokens, took_s, took_s - fixed_s)
        self._number += 1
        self._newest[num_tokens.bit_length()] = now
        self._newest = {size: one for size, one in self._newest.items() if one is now or one.agrees(now)}
        token_s = now.computed_s / num_tokens
        if len(self._newest) > 1:
            counted = self._newest.values()
            slope_s, rest_s = linear_regression([one.tokens for one in counted], [one.computed_s for one in counted])
            if slope_s > 0 and rest_s >= 0:
                token_s, fixed_s = slope_s, fixed_s + rest_s
        # A fixed time that only this forward shows does not excuse it: it may be an outlier.
        too_long = took_s > max(self._max_wait_s, 2 * min(fixed_s, self._fixed_s))
        wanted = max(self._max_wait_s - fixed_s, fixed_s) / max(token_s, 1e-9)
        wanted = min(wanted, num_tokens if too_long else 2 * num_tokens)
        if num_tokens <= LEAST_WAITED_CHUNK and len(self._newest) == 1 and took_s > self._max_wait_s:
            wanted = 2 * num_tokens  # shows whether fewer tokens take less time at all
        self._tokens, self._fixed_s = int(min(self._most, max(LEAST_WAITED_CHUNK, wanted))), fixed_s
