"""The figures of a report, one file per subject."""

from moetool.report.figures import affinity_heatmap, entropy, hit_rates, load
from moetool.report.figures.plot import Plot
from moetool.report.trace_measures import TraceMeasures

_SECTIONS = {
    "Popularity": (load.popularity,),
    "Tasks": (load.by_task, load.by_layer, load.task_maps, load.tasks_apart),
    "Load skew": (load.skew, load.coverage),
    "Entropy": (entropy.levels, entropy.spread, entropy.router),
    "Affinity": (affinity_heatmap.affinity_maps, affinity_heatmap.affinity),
    "Reuse": (hit_rates.distances, hit_rates.layer_distances),
    "Hit rates": (hit_rates.budgets,),
}


def plots(made: TraceMeasures) -> dict[str, list[Plot]]:
    """Return the figures that a trace supports, by section."""
    drawn = {section: [plot_of(made) for plot_of in several] for section, several in _SECTIONS.items()}
    return {section: [plot for plot in several if plot is not None] for section, several in drawn.items()}
