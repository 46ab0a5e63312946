"""Measurement of the `CostProfile` of a model, or of its config alone, on this machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moetool.base.errors import UsageError
from moetool.base.machine import load_average
from moetool.base.tables import aligned
from moetool.base.types import ModelSpec
from moetool.costing.costs import ComputeCosts, CostProfile, Curve, LoadCosts
from moetool.measuring.probes.disk import disk_costs, scratch_shards
from moetool.measuring.probes.expert_compute import expert_curve
from moetool.measuring.probes.host_copies import copy_costs
from moetool.measuring.probes.layer import LayerCurves, layer_curves
from moetool.measuring.probes.link import link_curve, parse_peer
from moetool.measuring.probes.prediction import prediction_curve
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.location import shape_names
from moetool.models.files.tensor_index import has_weights
from moetool.models.libraries import read_machine
from moetool.models.loading import CPU, DTYPES, parse_device, parse_dtype, served_dtype, use_threads
from moetool.runtime.automatic import on_this_machine
from moetool.training.predictor import load_predictor

_SCRATCH_EXPERTS = 32
MIN_SCRATCH_BYTES, _MAX_SCRATCH_BYTES = 64 * 10**6, 512 * 10**6

_Stages = dict[tuple[str, ...], Callable[[float], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of the measurement.

    Attributes:
        config_only: without weights: reads are timed on a file of random bytes.
        device: `cpu` or `cuda` (default: a server's, and beside a GPU also the processor, which computes misses).
        dtype: data type of everything but the routed experts (default: a server's).
        seconds: seconds to measure after one full pass.
        threads: compute threads on the CPU (0 = automatic, as in the server).
        predictor: folder of a trained predictor to time.
        peer: HOST:PORT of a running `moetool profile --listen`.
        scratch: folder on the disk to measure, for the file of random bytes.
    """

    config_only: bool = False
    device: str | None = None
    dtype: str | None = None
    seconds: float = 120.0
    threads: int = 0
    predictor: Path | None = None
    peer: str | None = None
    scratch: Path = Path()


EVERYTHING = ProfileOptions()


def profile(
    model: str,
    options: ProfileOptions = EVERYTHING,
    on_progress: Callable[[int], None] | None = None,
    on_note: Callable[[str], object] = lambda note: None,
) -> CostProfile:
    """Measure a model's costs on this machine.

    Compute is timed on random weights of the model's shape, one layer at a time, since values do not change the time.
    Reads are timed on the model's files, or, with `config_only`, on a file of random bytes.

    Args:
        model: as in `moetool.models.checkpoint.Checkpoint.open`.
        on_progress: called with the completed percentage.
        on_note: called with each line on what was chosen.

    Effects: sets torch's number of threads.

    Raises:
        UsageError: there is no such model, config, device, data type, predictor or peer.
        MismatchError: the weight files are damaged, or the predictor is of another model.
        CapacityError: there is too little memory for one layer, or disk for the file.
    """
    began = time.perf_counter()
    busy = load_average()
    if options.dtype is not None:
        parse_dtype(options.dtype)
    if options.device is not None:
        parse_device(options.device)
    peer = options.peer
    if peer is not None:
        parse_peer(peer)
    checkpoint = _open(model, options.config_only)
    spec = checkpoint.spec
    num_threads = use_threads(checkpoint.config, options.threads)
    dtypes, choices = _choose(checkpoint, options)
    threads = "as set" if options.threads else "automatic"
    for line in aligned([*choices, ("threads", str(num_threads), threads)]):
        on_note(line)

    stages: _Stages = {}
    if peer is not None:
        stages["link",] = lambda share: link_curve(peer, share)
    if options.predictor is not None:
        stages["predictor",] = _predictor_stage(options.predictor, spec, options.config_only)
    fastest = None if "cuda" in dtypes else dtypes["cpu"]
    stages["disk",] = lambda share: _disk(checkpoint, fastest, options.scratch, share)
    if "cuda" in dtypes:
        stages["copies",] = lambda share: copy_costs(spec.slot_bytes, share)
    for device, kind in dtypes.items():
        stages["expert", device, _name(kind)] = partial(_expert, checkpoint, kind, device)
        stages["layer", device, _name(kind)] = partial(layer_curves, checkpoint, kind, device)
    with checkpoint:
        results = _run(stages, options.seconds, on_progress)

    compute = [_compute_costs(checkpoint, device, kind, num_threads, results) for device, kind in dtypes.items()]
    loads: tuple[LoadCosts, ...] = (*results["disk",], *results.get(("copies",), ()))
    return CostProfile(
        spec=spec,
        config_only=options.config_only,
        num_hidden_layers=int(checkpoint.config.num_hidden_layers),
        machine=read_machine(),
        load_average=busy,
        measured_s=time.perf_counter() - began,
        compute=tuple(compute),
        loads=loads,
        predictor=results.get(("predictor",)),
        peer=peer,
        link=results.get(("link",)),
    )


def _choose(
    checkpoint: Checkpoint, options: ProfileOptions
) -> tuple[dict[str, torch.dtype], list[tuple[str, str, str]]]:
    """Return the data type on each device, and (setting, value, reason) for display."""
    given = {name: value for name in ("device", "dtype") if (value := getattr(options, name)) is not None}
    chosen, why = on_this_machine(checkpoint, given)
    why |= dict.fromkeys(given, "as set")
    dtypes = {chosen["device"]: parse_dtype(chosen["dtype"])}
    if chosen["device"] == "cuda" and options.device is None:
        dtypes = {"cpu": parse_dtype(options.dtype or served_dtype(checkpoint, CPU)[0]), **dtypes}
        why["device"] += "; the processor computes misses"
    kinds = ", ".join(dict.fromkeys(map(_name, dtypes.values())))
    return dtypes, [("device", ", ".join(dtypes), why["device"]), ("dtype", kinds, why["dtype"])]


def _run(stages: _Stages, seconds: float, on_progress: Callable[[int], None] | None) -> dict[tuple[str, ...], Any]:
    """Run the stages in order; each gets an equal share of the remaining time."""
    began = time.perf_counter()
    results = {}
    for done, (name, stage) in enumerate(stages.items()):
        left = seconds - (time.perf_counter() - began)
        results[name] = stage(max(0.0, left) / (len(stages) - done))
        if on_progress is not None:
            on_progress(100 * (done + 1) // len(stages))
    return results


def _open(model: str, config_only: bool) -> Checkpoint:
    if not config_only and model in shape_names():
        raise UsageError(f"{model} is a shape without weights; profile it with --config-only")
    checkpoint = Checkpoint.open(model, weights=not config_only)
    if not config_only and not has_weights(checkpoint.path):
        raise UsageError(f"{checkpoint.path} holds no .safetensors weights; profile its shape with --config-only")
    return checkpoint


def _predictor_stage(path: Path, spec: ModelSpec, config_only: bool) -> Callable[[float], Curve]:
    if config_only:
        raise UsageError("a predictor belongs to a model's weights; leave out --config-only or --predictor")
    predictor = load_predictor(path)
    spec.require_same(predictor.spec, "the model", "the predictor")
    return lambda share: prediction_curve(predictor, share)


def _expert(checkpoint: Checkpoint, dtype: torch.dtype, device: str, share: float) -> Curve:
    files = None
    if checkpoint.weights and checkpoint.quantization:
        files = checkpoint.expert_files(fastest=dtype if device == "cpu" else None)
    form, weights = checkpoint.layers[0].form, checkpoint.declared_dtype
    if checkpoint.quantization and checkpoint.slot_bytes(dtype) == form.num_elements * dtype.itemsize:
        weights = dtype  # unpacked, in slots
    return expert_curve(form, form.input_size, weights, dtype, device, share, files)


def _disk(checkpoint: Checkpoint, fastest: torch.dtype | None, scratch: Path, share: float) -> tuple[LoadCosts, ...]:
    """Measure the disk. Args: fastest: as in `Checkpoint.expert_files`; a load includes unpacking."""
    spec = checkpoint.spec
    if not checkpoint.weights:
        num_bytes = min(max(_SCRATCH_EXPERTS * spec.slot_bytes, MIN_SCRATCH_BYTES), _MAX_SCRATCH_BYTES)
        with scratch_shards(scratch, max(num_bytes, spec.slot_bytes)) as made:
            return disk_costs(made, spec.slot_bytes, share)
    files = checkpoint.expert_files(fastest=fastest)
    return disk_costs(files.shards, files.stored_bytes, share, files)


def _compute_costs(
    checkpoint: Checkpoint, device: str, kind: torch.dtype, threads: int, results: dict[tuple[str, ...], Any]
) -> ComputeCosts:
    dtype = _name(kind)
    layer: LayerCurves = results["layer", device, dtype]
    return ComputeCosts(
        device=device,
        dtype=dtype,
        threads=threads,
        slot_bytes=checkpoint.slot_bytes(kind if device == "cpu" else None),
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
