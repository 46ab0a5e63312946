"""Values and curves that an experiment collects, seed by seed."""

from collections.abc import Iterable
from typing import SupportsFloat

from moetool.bench.experiment_figure import Curve, ExperimentResult
from moetool.bench.paper.workbench import Workbench
from moetool.trace.reader import Trace


class Samples:
    """Values and curves of an experiment, and the traces behind them.

    Attributes:
        values, curves, best, highest_best, whole_layers: as in `ExperimentResult`.
        traces: traces by path.
    """

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self.values: dict[str, list[float]] = {}
        self.curves: dict[str, list[Curve]] = {}
        self.best: dict[str, list[float]] = {}
        self.highest_best = False
        self.whole_layers: dict[str, None] = {}
        self.traces: dict[str, Trace] = {}

    def use(self, *traces: Trace) -> Trace:
        """Count traces as measured; return the first."""
        self.traces |= {str(trace.path): trace for trace in traces}
        return traces[0]

    def add(self, name: str, value: SupportsFloat) -> None:
        """Add the next seed's value."""
        self.values.setdefault(name, []).append(float(value))

    def draw(self, name: str, x: Iterable[float], y: Iterable[float]) -> None:
        """Add the next seed's line of a curve."""
        self.curves.setdefault(name, []).append((tuple(map(float, x)), tuple(map(float, y))))

    def sweep(self, name: str, x: Iterable[float], values: Iterable[Iterable[float]], scale: float = 1.0) -> None:
        """Draw the values at each abscissa as one line per seed."""
        for column in zip(*values, strict=True):
            self.draw(name, x, (scale * value for value in column))

    @property
    def independent(self) -> int:
        """Number of independent sets of traces, with one trace per server in a set."""
        return self._bench.parts(self.traces)

    def found(
        self,
        what: str,
        unit: str,
        on: str = "",
        *,
        axes: tuple[str, str] = ("", ""),
        exact: bool = False,
        traces: int | None = None,
    ) -> ExperimentResult:
        """Return the results.

        Args:
            what, unit, axes, exact: as in `ExperimentResult`.
            on: added to the description of the traces.
            traces: number of independent traces (default: of all).
        """
        measured = self._bench.on(list(self.traces.values()))
        spec = next(iter(self.traces.values())).spec
        return ExperimentResult(
            values=self.values,
            what=what,
            unit=unit,
            on=f"{measured}; {on}" if on else measured,
            curves=self.curves,
            axes=axes,
            exact=exact,
            traces=len(self.traces) if traces is None else traces,
            experts=(spec.num_experts, max(spec.top_k_L)),
            expert_bytes=spec.all_experts_bytes,
            best=self.best,
            highest_best=self.highest_best,
            whole_layers=tuple(self.whole_layers),
        )
