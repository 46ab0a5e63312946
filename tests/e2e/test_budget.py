"""For the same memory a plan and a server have the same slots and the same KV cache."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from moetool.base.config import parse
from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.caching.plan import CachePlan, PredictorReference
from moetool.capture.run import CaptureOptions, capture
from moetool.cli.cache_plans import device_budget
from moetool.models.checkpoint import Checkpoint
from moetool.prompts.gather import load
from moetool.runtime.assembly import build_engine
from moetool.runtime.automatic import choose, on_this_machine
from moetool.runtime.budget import Wishes, divide_memory, least_and_most, served_budgets, this_machine
from moetool.runtime.serve_options import ServeOptions
from moetool.trace.edit import head
from moetool.trace.reader import Trace
from moetool.training.predictor import load_predictor
from moetool.training.training import train
from moetool.tuning.cache_planning import CacheSearch, plan_cache
from tests.artefacts import CACHE_PLAN
from tests.refusals import refused

GGUF = str(Path(__file__).parents[1] / "golden" / "gguf" / "qwen3moe.gguf")
BASE = {"device": "cpu", "warm_start": False}


def _options(checkpoint: Checkpoint, values: dict[str, object]) -> ServeOptions:
    return parse(ServeOptions, on_this_machine(checkpoint, values)[0], "--set")


@pytest.mark.parametrize("predictor", [0, 3_000_000])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 1.3])
@pytest.mark.parametrize("given", [{}, {"kv_tokens": 2048}, {"dtype": "float32"}])
@pytest.mark.parametrize("model", ["reference", GGUF])
def test_plans_and_servers_divide_a_memory_alike(
    model: str, given: dict[str, object], share: float, predictor: int
) -> None:
    checkpoint, values = Checkpoint.open(model), {**BASE, **given}
    options = _options(checkpoint, values)
    least, most = least_and_most(checkpoint, options, fixed_kv="kv_tokens" in given)
    memory = int(least + share * (most - least)) + predictor
    served = choose(checkpoint, values, device_memory_bytes=memory, predictor_bytes=predictor).budget
    made = served_budgets(checkpoint, options, values)(memory, predictor)
    room = device_budget(checkpoint, options, values, memory).divide(memory, predictor)
    found = {(one.slots, one.kv_tokens, one.dense_bytes, one.kv_bytes) for one in (served, made, room)}
    assert len(found) == 1 and served.slots >= 2
    assert (served.slots == checkpoint.spec.total_experts) == (share > 1)
    parts = served.dense_bytes + served.predictor_bytes + served.kv_bytes + served.slots_bytes
    assert parts + served.unused_bytes == served.limit_bytes == memory


@pytest.mark.follows("moetool.runtime.budget this_machine")
def test_the_memory_of_a_process_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 1), ("mem_get_info", (2**30, 2**30))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    checkpoint, options = Checkpoint.open("reference"), ServeOptions(device="cuda")
    with refused(UsageError, "use --host-memory"):
        this_machine(checkpoint, options, process_memory_bytes=2**30)
    assert this_machine(checkpoint, replace(options, host_memory_bytes=2**30)).limit_bytes > 2**29


@pytest.mark.follows("moetool.runtime.assembly _predictor")
def test_a_plan_keeps_to_its_predictor(tmp_path: Path) -> None:
    trace = capture("reference", load(["chat"], max_prompts=4), tmp_path / "t", CaptureOptions(dtype="float32")).out
    mine, other = tmp_path / "p", tmp_path / "q"
    for out, tokens in ((mine, 1), (other, 2)):
        train("popularity", head(Trace(trace), tmp_path / f"part{tokens}", requests=1 + tokens).path, out)
    needed = PredictorReference(name="popularity", sha256=load_predictor(mine).sha256, path=str(other))
    checkpoint = Checkpoint.open("reference")
    facts = {**CACHE_PLAN(), "spec": checkpoint.spec.to_json(), "policy": "promoe", "slots": 64, "dtype": "float32"}
    facts |= {"budget_bytes": 5_000_000, "dense_bytes": 7_000_000, "device_memory_bytes": 30_000_000, "kv_tokens": 256}
    (tmp_path / "plan.json").write_text(json.dumps({**facts, "predictor": asdict(needed), "predictor_bytes": 1}))
    plan = CachePlan.load(tmp_path / "plan.json")
    serving = partial(build_engine, checkpoint, options=ServeOptions(kv_tokens=256), plan=plan)
    with refused(MismatchError, "--predictor"):
        serving(device_memory_bytes=30_000_000)
    serving(device_memory_bytes=30_000_000, predictor=mine).close()


@pytest.mark.parametrize("memory", [12_000_000, 20_000_000])
def test_a_plan_of_the_reference_has_the_slots_of_a_server_without_it(
    memory: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("budget")
    trace = Trace(
        capture(
            "reference", load(["chat"], max_prompts=4), folder / "t", CaptureOptions(dtype="float32", batch_size=1)
        ).out
    )
    checkpoint, values = Checkpoint.open("reference"), {**BASE, "dtype": "float32"}
    device = device_budget(checkpoint, _options(checkpoint, values), values, memory)
    plan = plan_cache(trace, device, CacheSearch(policies=["lru"], frontier=3))
    alone = choose(checkpoint, values, device_memory_bytes=memory).budget
    assert (plan.slots, plan.kv_tokens) == (alone.slots, alone.kv_tokens)
    for point in plan.frontier:
        other = choose(checkpoint, values, device_memory_bytes=point["device_memory_bytes"]).budget
        assert point["slots"] == other.slots
    planned = {**values, "kv_tokens": plan.kv_tokens, "dtype": plan.dtype}
    setup = choose(
        checkpoint,
        planned,
        device_memory_bytes=plan.device_memory_bytes,
        policy=plan.policy,
        planned=["kv_tokens", "dtype", "memory", "policy"],
        slots=plan.slots,
    )
    for arguments in ({"device_memory_bytes": setup.budget}, {}):
        engine = build_engine(checkpoint, options=setup.options, plan=plan, **arguments)
        assert engine.store.num_slots == plan.slots
        engine.close()


def test_every_division_names_its_parts_and_the_least_memory() -> None:
    checkpoint = Checkpoint.open("reference")
    options = _options(checkpoint, BASE)
    least, _ = least_and_most(checkpoint, options, fixed_kv=False)
    served = served_budgets(checkpoint, options, BASE)
    assert served(least, 0).slots == 2
    fixed = Wishes(options=options, device_memory_bytes=1_000_000)
    for divide in (lambda: served(least - 1, 0), lambda: divide_memory(checkpoint, fixed)):
        with refused(CapacityError, "KV cache", "2"):
            divide()
