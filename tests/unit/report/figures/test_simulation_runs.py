"""Data behind the figures of simulated runs."""

from moetool.report.figures import simulation_runs as simulated
from moetool.simulation.simulation_results import ServedRequest, Simulated


def _run(latencies_s: list[float], started_s: list[float] | None = None) -> Simulated:
    started = started_s or [0.0] * len(latencies_s)
    served = tuple(
        ServedRequest(
            server="s",
            gpu=0,
            prompt_tokens=1,
            new_tokens=1,
            arrived_s=0.0,
            started_s=begun,
            first_s=begun,
            finished_s=latency,
        )
        for latency, begun in zip(latencies_s, started, strict=True)
    )
    return Simulated(
        mode="",
        seed=0,
        costs="",
        served=served,
        local=0.5,
        windows=(),
        utilisation_G=(0.5, 0.25),
        links=(("s -> t", 10, 0.1), ("t -> s", 20, 0.1)),
        migrations=(),
        seconds=10.0,
    )


def test_bars_compare_modes_on_the_same_requests() -> None:
    """Ratios are taken seed by seed and group by group; a way to look ahead belongs to the mode."""
    runs = [
        ({"seed": seed, "gpus": gpus, "lookahead": look, "planner": mode}, _run([latency]))
        for seed, gpus, look, mode, latency in (
            ("0", "4", "true", "uniform", 2.0),
            ("0", "4", "true", "better", 1.0),
            ("0", "4", "predicted", "uniform", 2.0),
            ("0", "4", "predicted", "better", 1.5),
            ("1", "4", "true", "uniform", 10.0),
            ("1", "4", "true", "better", 9.0),
            ("0", "8", "true", "uniform", 4.0),
            ("0", "8", "true", "better", 1.0),
        )
    ]
    ratios = simulated.run_ratios(runs)
    assert ratios["4"]["better, true"] == [0.5, 0.9]
    assert ratios["4"]["better, predicted"] == [0.75]
    assert ratios["8"] == {"uniform, true": [1.0], "better, true": [0.25]}
    keys = [plot.key for plot in simulated.plots(runs)]
    assert keys == ["swept", "by-planner", "relative", "utilisation", "links"]


def test_batches_are_requests_that_start_together() -> None:
    found = _run([1.0, 2.0, 4.0, 6.0, 9.0, 9.0], [0.0, 0.0, 2.0, 2.0, 6.0, 6.0])
    assert simulated.rounds(found) == [1.5, 3.0, 3.0]
    assert "by-round" in [plot.key for plot in simulated.plots([({"planner": "a"}, found)])]
    alone = _run([1.0, 2.0, 4.0], [0.0, 0.5, 1.0])
    assert [plot.key for plot in simulated.plots([({"planner": "a"}, alone)])] == [
        "over-time",
        "utilisation",
        "links",
    ]
