"""Sizes of prompt chunks for which requests that decode wait."""

LEAST_CHUNK = 64
"""Fewest prompt tokens of a forward that other requests wait for: each forward may need every expert."""
_FIRST_CHUNK = 256  # before the time of a token is known


class PromptChunks:
    """Chooses how many prompt tokens a forward has, so that requests that decode wait no longer than a limit.

    A forward takes the time to load experts, which hardly depends on its tokens, and the time to compute them. Where
    loading alone takes longer than half of the limit, a chunk computes as long as it loads: decoding requests then wait
    longer, and the prompt takes at most about twice as long as in one forward.

    Args:
        max_wait_s: limit (0: none).
        most: tokens of a full chunk.
    """

    def __init__(self, max_wait_s: float, most: int) -> None:
        self._max_wait_s, self._most = max_wait_s, most
        self._tokens = min(_FIRST_CHUNK, most)

    def tokens(self, *, decoding: bool) -> int:
        """Most prompt tokens of the next forward; a full chunk if no request decodes or there is no limit."""
        return self._tokens if decoding and self._max_wait_s > 0 else self._most

    def observe(self, num_tokens: int, took_s: float, stalled_s: float) -> None:
        """Learn from a forward with this number of prompt tokens, whether or not a request waited for it.

        Args:
            stalled_s: its part that waited for experts.
        """
        if num_tokens < min(LEAST_CHUNK, self._tokens) // 2:
            return  # a decode step, or the end of a prompt
        stalled_s = min(stalled_s, took_s)
        token_s = max(took_s - stalled_s, 1e-9) / num_tokens
        wanted = int(max(self._max_wait_s - stalled_s, stalled_s) / token_s)
        self._tokens = min(self._most, max(LEAST_CHUNK, min(wanted, 2 * num_tokens)))
