"""The figures of a report, one file per subject."""

from moetool.report.figures import affinity_heatmap as affinity
from moetool.report.figures import entropy, load
from moetool.report.figures import hit_rates as caching
from moetool.report.figures.plot import Plot
from moetool.report.trace_measures import TraceMeasures

_SECTIONS = {
    "Popularity": (load.popularity,),
    "Tasks": (load.by_task, load.by_layer, load.task_maps, load.tasks_apart),
    "Load skew": (load.skew, load.coverage),
    "Entropy": (entropy.levels, entropy.spread, entropy.router),
    "Affinity": (affinity.affinity_maps, affinity.affinity),
    "Reuse": (caching.distances, caching.layer_distances),
    "Hit rates": (caching.budgets,),
}


def plots(made: TraceMeasures) -> dict[str, list[Plot]]:
    """Return the figures that a trace supports, by section."""
    drawn = {section: [plot_of(made) for plot_of in several] for section, several in _SECTIONS.items()}
    return {section: [plot for plot in several if plot is not None] for section, several in drawn.items()}
