"""Time of a simulation of 10,000 requests on 256 GPUs, printed.

python -m pytest tests/bench/test_simulation_reach.py -m '' -s
"""

import time

import pytest

from moetool.simulation.simulate import read_world, simulate
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.sweep import resize
from moetool.trace.reader import Trace
from moetool.types import Cluster, Gpu, Server
from tests.published_routes import TASKS, by_task, needs_routes

pytestmark = needs_routes


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    return by_task(tmp_path_factory.mktemp("routes"))


@pytest.mark.parametrize("mode", ["uniform", "prism"])
def test_ten_thousand_requests_on_256_gpus(traces: dict[str, Trace], mode: str) -> None:
    spec = traces["law"].spec
    gpu = Gpu(memory_bytes=round(0.3 * spec.total_experts) * spec.slot_bytes)
    servers = tuple(Server(name=task, gpus=(gpu,) * count) for task, count in zip(TASKS, (1, 1, 2), strict=True))
    large = resize(Cluster(servers=servers, link_bytes_s=500e6 / 8, link_latency_s=0.0005), 256)
    named = {server.name: traces[server.name.partition("#")[0]] for server in large.servers}
    wall, cpu = time.perf_counter(), time.process_time()
    found = simulate(read_world(named, large, SimulationOptions()), mode, "poisson:10s", 10_000, SimulationOptions())
    print(
        f"{mode}: {time.perf_counter() - wall:.1f} s ({time.process_time() - cpu:.1f} CPU), mean latency "
        f"{found.mean_s:.3f} s, {found.local:.1%} local"
    )
    assert len(found.served) == 10_000
    assert sum(one.new_tokens == 20 for one in found.served) > 9_000
