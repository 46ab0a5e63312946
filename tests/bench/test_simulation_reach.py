"""Time and memory of simulations of 10,000 requests on 256 and 1,024 GPUs, printed; memory is limited.

python -m pytest tests/bench/test_simulation_reach.py -m '' -s
"""

import resource
import time

import pytest

from moetool.base.types import Cluster, Gpu, Server
from moetool.simulation.simulate import read_world, simulate
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.sweep import resize
from moetool.trace.reader import Trace
from tests.published_routes import TASKS, by_task, needs_routes

pytestmark = needs_routes


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    return by_task(tmp_path_factory.mktemp("routes"))


@pytest.mark.parametrize(("mode", "num_gpus"), [("uniform", 256), ("prism", 256), ("director-proactive", 1024)])
def test_ten_thousand_requests(traces: dict[str, Trace], mode: str, num_gpus: int) -> None:
    spec = traces["law"].spec
    gpu = Gpu(memory_bytes=round(0.3 * spec.total_experts) * spec.slot_bytes)
    servers = tuple(Server(name=task, gpus=(gpu,) * count) for task, count in zip(TASKS, (1, 1, 2), strict=True))
    large = resize(Cluster(servers=servers, link_bytes_s=500e6 / 8, link_latency_s=0.0005), num_gpus)
    named = {server.name: traces[server.name.partition("#")[0]] for server in large.servers}
    wall, cpu = time.perf_counter(), time.process_time()
    found = simulate(read_world(named, large, SimulationOptions()), mode, "poisson:10s", 10_000, SimulationOptions())
    cpu = time.process_time() - cpu
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{mode}, {num_gpus} GPUs: {time.perf_counter() - wall:.1f} s ({cpu:.1f} CPU), peak {peak_bytes / 1e9:.2f} GB, "
        f"mean latency {found.mean_s:.3f} s, {found.local:.1%} local"
    )
    assert peak_bytes <= 4e9
    assert len(found.served) == 10_000
    assert sum(one.new_tokens == 20 for one in found.served) > 9_000
    assert cpu <= 600
