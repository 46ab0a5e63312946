"""Sizes of prompt chunks for which requests that decode wait."""

import numpy as np

LEAST_CHUNK = 64
"""Fewest prompt tokens of a forward that other requests wait for: each forward may need every expert."""
_FIRST_CHUNK = 256  # before the time of a token is known


class PromptChunks:
    """Chooses how many prompt tokens a forward has, so that requests that decode wait no longer than a limit.

    A forward has a fixed time, in which experts are loaded and their weights read, and a time per token. Both follow by
    least squares from the newest forwards of different sizes. Where the fixed time alone is more than half of the
    limit, a chunk's tokens take as long as the fixed time: decoding requests then wait longer, and the prompt takes at
    most about twice as long as in one forward.

    Args:
        max_wait_s: limit (0: none).
        most: tokens of a full chunk.
    """

    def __init__(self, max_wait_s: float, most: int) -> None:
        self._max_wait_s, self._most = max_wait_s, most
        self._tokens = min(_FIRST_CHUNK, most)
        self._newest: dict[int, tuple[int, float]] = {}  # tokens and seconds, by magnitude of the tokens

    def tokens(self, *, decoding: bool) -> int:
        """Most prompt tokens of the next forward; a full chunk if no request decodes or there is no limit."""
        return self._tokens if decoding and self._max_wait_s > 0 else self._most

    def observe(self, num_tokens: int, took_s: float, stalled_s: float) -> None:
        """Learn from a forward with this number of prompt tokens, whether or not a request waited for it.

        Args:
            stalled_s: its part that waited for experts: the fixed time until there are forwards of two sizes.
        """
        if num_tokens < min(LEAST_CHUNK, self._tokens) // 2:
            return  # a decode step, or the end of a prompt
        self._newest[num_tokens.bit_length()] = num_tokens, took_s
        sizes, times = (np.array(values) for values in zip(*self._newest.values(), strict=True))
        fixed_s = min(stalled_s, took_s)
        token_s = (took_s - fixed_s) / num_tokens
        if len(sizes) > 1:
            token_s, fixed_s = np.polyfit(sizes, times, 1).tolist()
        wanted = max(self._max_wait_s - fixed_s, fixed_s) / max(token_s, 1e-9)
        self._tokens = int(min(self._most, max(LEAST_CHUNK, min(wanted, 2 * num_tokens))))
