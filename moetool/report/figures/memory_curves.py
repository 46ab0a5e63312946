"""Loaded bytes and hit rate of cache policies against memory for experts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moetool.report.drawing import line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def paint(
    figure: "Figure", rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str], unit: tuple[str, float], of: str
) -> None:
    """Paint two panels: bytes loaded per new token, and hit rate in decode.

    Args:
        rows: rows of `moetool replay --json`.
        labels: legend text by policy, in the order of the series.
        unit: name and bytes of the unit of both axes, e.g. ("GB", 1e9); or ("experts", 1).
        of: text with the model and the memory of all its experts.
    """
    name, size = unit
    loaded, memory_label = f"{name} of experts", f"memory for experts, {name}"
    if name == "experts":
        loaded, memory_label = name, "expert slots"
    left, right = figure.subplots(1, 2)
    for series, (policy, label) in enumerate(labels.items()):
        mine = [row for row in rows if row["policy"] == policy]
        memory = [row["budget_bytes"] / size for row in mine]
        line(left, memory, [row["bytes_per_decode_token"] / size for row in mine], series, label)
        line(right, memory, [row["hit_rate_decode"] for row in mine], series, label)
    left.set(title=f"{loaded} loaded for each new token", ylim=(0, None), xlim=(0, None))
    right.set(title="hit rate", ylim=(0, 1), xlim=(0, None))
    figure.suptitle(of, fontsize=9.5, x=0.01, ha="left")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    for axes in (left, right):
        axes.set_xlabel(memory_label)
