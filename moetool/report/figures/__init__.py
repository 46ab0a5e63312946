"""The figures of a report, one file per subject."""

from moetool.report.figures import affinity_heatmap as affinity
from moetool.report.figures import entropy, load
from moetool.report.figures import hit_rates as caching
from moetool.report.figures.figure import Picture
from moetool.report.trace_measures import TraceMeasures


def pictures(made: TraceMeasures) -> list[Picture]:
    """Return all figures that a trace supports, section by section."""
    drawn = [
        load.popularity(made),
        load.by_task(made),
        load.by_layer(made),
        load.task_maps(made),
        load.tasks_apart(made),
        load.skew(made),
        load.coverage(made),
        entropy.levels(made),
        entropy.spread(made),
        entropy.router(made),
        affinity.affinity_maps(made),
        affinity.affinity(made),
        caching.distances(made),
        caching.layer_distances(made),
        caching.budgets(made),
    ]
    return [picture for picture in drawn if picture is not None]
