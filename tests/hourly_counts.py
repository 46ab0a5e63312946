"""Counts of a day by hour, made from counts of some sources: the file that an operator's recorder leaves."""

from pathlib import Path

import numpy as np

HOURS = 24


def write_day(path: Path, counts_SLE: np.ndarray, tokens: int = 20_000, seed: int = 0) -> Path:
    """Write `hour,layer,expert,count`: each source is busiest at another hour, and the whole day has a busy half.

    Args:
        counts_SLE: uses of each expert by source.
        tokens: expert uses of a layer in a mean hour.
    """
    rng = np.random.default_rng(seed)
    share_SLE = counts_SLE / counts_SLE.sum(axis=2, keepdims=True)
    lines = ["hour,layer,expert,count"]
    for hour in range(HOURS):
        turn_S = 2 * np.pi * (hour / HOURS - np.arange(len(share_SLE)) / len(share_SLE))
        weight_S = np.exp(1.5 * np.cos(turn_S))
        busy = 1 + 0.5 * np.cos(2 * np.pi * (hour - 14) / HOURS)
        mixed_LE = np.tensordot(weight_S / weight_S.sum(), share_SLE, axes=1)
        for layer, expert_E in enumerate(mixed_LE):
            drawn_E = rng.multinomial(int(tokens * busy), expert_E / expert_E.sum()).tolist()
            lines += [f"{hour},{layer},{expert},{count}" for expert, count in enumerate(drawn_E)]
    path.write_text("\n".join(lines) + "\n")
    return path
