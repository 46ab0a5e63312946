"""From a model, or its config alone, and this machine to a `CostProfile`."""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moetool.costing.costs import ComputeCosts, CostProfile, Curve, LoadCosts
from moetool.costing.probes.copies import copy_costs
from moetool.costing.probes.disk import disk_costs, scratch_shards
from moetool.costing.probes.experts import expert_curve
from moetool.costing.probes.layer import LayerCurves, layer_curves
from moetool.costing.probes.link import link_curve, parse_peer
from moetool.costing.probes.prediction import prediction_curve
from moetool.errors import UsageError
from moetool.machine import load_average, read_machine
from moetool.models import shapes
from moetool.models.checkpoint import sources
from moetool.models.expert_files import ExpertFiles
from moetool.models.loading import DTYPES, parse_dtype, use_threads
from moetool.models.shards import Shards
from moetool.models.spec import config_dtype, empty_model, locate, moe_layers, read_config, read_packing, read_spec
from moetool.predictor import load_predictor
from moetool.types import ModelSpec

_SCRATCH_EXPERTS = 32
_MIN_SCRATCH_BYTES, _MAX_SCRATCH_BYTES = 64 * 10**6, 512 * 10**6

_Stages = dict[tuple[str, ...], Callable[[float], Any]]


def profile(
    model: str,
    *,
    config_only: bool = False,
    dtype: str | None = None,
    seconds: float = 120.0,
    threads: int = 0,
    predictor: Path | None = None,
    peer: str | None = None,
    scratch: Path = Path(),
    on_progress: Callable[[int], None] | None = None,
) -> CostProfile:
    """Measure what a model costs on this machine.

    Arithmetic is timed on random weights of the model's shape, one layer at a time, since values do not change the
    time; reads are timed on the model's own files, or, by config alone, on a file of random bytes.

    Args:
        model: as `moetool.models.spec.locate` takes it, or, by config alone, `moetool.models.shapes.locate_config`.
        dtype: of everything but the routed experts; float32 and bfloat16 both, if not said.
        seconds: how long to measure. Everything is measured once, however long that takes.
        threads: of the arithmetic on the CPU; 0 chooses as the server does.
        predictor: folder of a trained predictor to time.
        peer: HOST:PORT of a `moetool profile --listen`.
        scratch: a folder on the disk to try, for the file of random bytes.
        on_progress: called with how much is done, in percent.

    Effects: sets torch's number of threads.

    Raises:
        UsageError: there is no such model, config, data type, predictor or peer.
        MismatchError: the weight files are damaged, or the predictor is of another model.
        CapacityError: memory for one layer, or disk for the file, is short.
    """
    began = time.perf_counter()
    busy = load_average()
    dtypes = [parse_dtype(dtype)] if dtype else [torch.float32, torch.bfloat16]
    if peer is not None:
        parse_peer(peer)
    path = _locate(model, config_only)
    config = read_config(path)
    spec = read_spec(path, weights=not config_only)
    num_threads = use_threads(config, threads)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

    stages: _Stages = {}
    if peer is not None:
        stages["link",] = lambda share: link_curve(peer, share)
    if predictor is not None:
        stages["predictor",] = _predictor_stage(predictor, spec, config_only)
    stages["disk",] = lambda share: _disk(path, spec, config, config_only, scratch, share)
    if "cuda" in devices:
        stages["copies",] = lambda share: copy_costs(spec.slot_bytes, share)
    for device in devices:
        for kind in dtypes:
            packed = path if not config_only and read_packing(path) else None
            stages["expert", device, _name(kind)] = _expert_stage(config, kind, device, spec, packed)
            stages["layer", device, _name(kind)] = partial(layer_curves, config, kind, device)
    results = _run(stages, seconds, on_progress)

    compute = [_compute_costs(device, _name(kind), num_threads, results) for device in devices for kind in dtypes]
    loads: tuple[LoadCosts, ...] = (*results["disk",], *results.get(("copies",), ()))
    return CostProfile(
        spec=spec,
        config_only=config_only,
        num_hidden_layers=int(config.num_hidden_layers),
        machine=read_machine(),
        load_average=busy,
        measured_s=time.perf_counter() - began,
        compute=tuple(compute),
        loads=loads,
        predictor=results.get(("predictor",)),
        peer=peer,
        link=results.get(("link",)),
    )


def _run(stages: _Stages, seconds: float, on_progress: Callable[[int], None] | None) -> dict[tuple[str, ...], Any]:
    """Run the stages in order; each has an equal share of the time that the ones before it have left."""
    began = time.perf_counter()
    results = {}
    for done, (name, stage) in enumerate(stages.items()):
        left = seconds - (time.perf_counter() - began)
        results[name] = stage(max(0.0, left) / (len(stages) - done))
        if on_progress is not None:
            on_progress(100 * (done + 1) // len(stages))
    return results


def _locate(model: str, config_only: bool) -> Path:
    if config_only:
        return shapes.locate_config(model)
    if model in shapes.names():
        raise UsageError(f"{model} is a shape without weights; profile it with --config-only")
    path = locate(model)
    if not any(path.glob("*.safetensors")):
        raise UsageError(f"{path} holds no .safetensors weights; profile its shape with --config-only")
    return path


def _predictor_stage(path: Path, spec: ModelSpec, config_only: bool) -> Callable[[float], Curve]:
    if config_only:
        raise UsageError("a predictor belongs to a model's weights; leave out --config-only or --predictor")
    predictor = load_predictor(path)
    spec.require_same(predictor.spec, "the model", "the predictor")
    return lambda share: prediction_curve(predictor, share)


def _expert_stage(
    config: Any, dtype: torch.dtype, device: str, spec: ModelSpec, packed: Path | None
) -> Callable[[float], Curve]:
    """Args: packed: the model's folder, where its experts are packed."""
    weights = config_dtype(config)

    def stage(share: float) -> Curve:
        form = moe_layers(empty_model(config, dtype))[0].form
        products = dtype == torch.bfloat16 and device == "cpu"
        with contextlib.nullcontext() if packed is None else _expert_files(packed, spec, config, products) as files:
            return expert_curve(form, int(config.hidden_size), weights, dtype, device, share, files)

    return stage


def _disk(
    path: Path, spec: ModelSpec, config: Any, config_only: bool, scratch: Path, share: float
) -> tuple[LoadCosts, ...]:
    if config_only:
        num_bytes = min(max(_SCRATCH_EXPERTS * spec.slot_bytes, _MIN_SCRATCH_BYTES), _MAX_SCRATCH_BYTES)
        with scratch_shards(scratch, max(num_bytes, spec.slot_bytes)) as made:
            return disk_costs(made, spec.slot_bytes, share)
    with _expert_files(path, spec, config) as files:
        return disk_costs(files.shards, files.slot_bytes, share, files)


@contextlib.contextmanager
def _expert_files(path: Path, spec: ModelSpec, config: Any, products: bool = False) -> Iterator[ExpertFiles]:
    shards = Shards(path, packing=read_packing(path))
    try:
        model = empty_model(config, torch.float32)
        yield ExpertFiles(shards, moe_layers(model), spec, sources(model, shards.tensors), products=products)
    finally:
        shards.close()


def _compute_costs(device: str, dtype: str, threads: int, results: dict[tuple[str, ...], Any]) -> ComputeCosts:
    layer: LayerCurves = results["layer", device, dtype]
    return ComputeCosts(
        device=device,
        dtype=dtype,
        threads=threads,
        expert=results["expert", device, dtype],
        attention=layer.attention,
        prompt_attention=layer.prompt_attention,
        gate=layer.gate,
        shared=layer.shared,
        dense=layer.dense,
        head=layer.head,
    )


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)
