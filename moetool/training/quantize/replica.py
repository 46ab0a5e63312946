"""Building of a low-bit replica of a model, layer by layer, and its check by reload and score.

Finished layers are kept in `OUT.resume` next to the result (`moetool.training.quantize.replica_layers`).
"""

import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from moetool import __version__
from moetool.base import durable
from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.base.machine import memory_bytes
from moetool.base.tables import count, percent
from moetool.models.checkpoint import Checkpoint
from moetool.models.conversion import TensorSource
from moetool.models.loading import CPU, load_unpacked, parse_dtype, served_dtype
from moetool.training.quantize.calibration import Calibration
from moetool.training.quantize.folding import require_family, rounded_names
from moetool.training.quantize.judging import judge, logits_of
from moetool.training.quantize.replica_layers import ReplicaOptions, ReplicaProgress

CARD = "card.json"
GROUPS = (16, 32, 64, 128)
_AGREE = 1e-3  # tolerance between logits of transformers and moetool, as a share of the largest


def make_replica(
    checkpoint: Checkpoint,
    out: Path,
    calibration: Calibration,
    options: ReplicaOptions,
    *,
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Round a model's attention and experts, save it, load it again and compare it with the model.

    Memory holds the dense weights, and at most one layer twice. After a kill, the same call resumes at the unfinished
    layer.

    Args:
        facts: additional entries of the card.
        on_progress: called with the finished steps and the total: two for each layer, and the reload.

    Effects: writes `out`, whole or not at all; keeps `out.resume` until then.

    Returns:
        The card.

    Raises:
        UsageError: the family, layout or group is not supported, or `out` exists.
        MismatchError: transformers or moetool cannot load the saved files.
        MoetoolError: a weight or an activation is not finite.
    """
    durable.require_absent(out, overwrite, CARD)
    require_replicable(checkpoint, options)
    began = time.perf_counter()
    dtype = parse_dtype(options.dtype)
    with durable.staged_directory(out, overwrite, CARD) as staged:
        maker = ReplicaProgress(checkpoint, out.with_name(out.name + ".resume"), calibration, options)
        steps = 2 * maker.num_layers + 1
        report = (lambda done: on_progress(done, steps)) if on_progress is not None else (lambda done: None)
        try:
            notes = maker.layers(report)
            maker.finish(staged)
        finally:
            maker.close()
        made = Checkpoint(staged)
        judged = judge(checkpoint, made, calibration.judged_NS, dtype, lambda done: report(maker.num_layers + done))
        if not math.isfinite(judged.kl):
            shutil.rmtree(maker.folder, ignore_errors=True)  # a resumed run would fail here again
            remedy = "--set dtype=float32" if dtype == torch.float16 else "other --data"
            raise MoetoolError(
                f"{checkpoint.path} or its replica gives logits that are NaN or infinite on the scoring text, expected "
                f"none; try {remedy}"
            )
        reloaded = _check(made, calibration.judged_NS[:1], judged.logits if dtype == torch.float32 else None)
        report(steps)
        card = {
            "kind": "predictor",
            "schema_version": 1,
            "moetool_version": __version__,
            "predictor": "awq_replica",
            "options": {},
            "spec": maker.spec.to_json(),
            "parameters": 0,
            "quantization": asdict(options),
            "judged": judged.to_json(),
            "few_tokens": {note["layer"]: note["few_tokens"] for note in notes if note["few_tokens"]},
            "layers": notes,
            "reloaded_by": reloaded,
            "weights": {
                "bytes": made.index.num_bytes,
                "of_bytes": checkpoint.index.num_bytes,
                "revision": made.revision,
                "sha256": {file.name: durable.sha256_file(file) for file in made.index.files},
            },
            "trace": {"sha256": "", "tokens": calibration.ids_NS.numel() + calibration.judged_NS.numel()},
            "fit": {},
            "requests": {"train": [], "validation": [], "test": []},
            "seen_prompts": calibration.seen_prompts,
            "datasets": calibration.datasets,
            "tokens": {"train": calibration.ids_NS.numel(), "judged": calibration.judged_NS.numel()},
            "seconds": round(time.perf_counter() - began, 2),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            **(facts or {}),
        }
        text = json.dumps(card, indent=1) + "\n"
        (staged / "README.md").write_text(_readme(card, checkpoint.path), encoding="utf-8")
        durable.write_text(staged / CARD, text)
    shutil.rmtree(maker.folder, ignore_errors=True)
    return json.loads(text)


def choose(
    checkpoint: Checkpoint, options: ReplicaOptions, given: Collection[str]
) -> tuple[ReplicaOptions, list[tuple[str, str, str]]]:
    """Choose the data type as a server on a CPU does, unless it is set, and require its memory.

    Returns:
        The options, and (setting, value, reason) for display.

    Raises:
        CapacityError: the memory is too small, with its parts.
    """
    dtype, why = (options.dtype, "as set") if "dtype" in given else served_dtype(checkpoint, CPU)
    size, free = parse_dtype(dtype).itemsize, memory_bytes()[1]
    dense = checkpoint.dense_bytes(parse_dtype(dtype))
    layer = size * max(layer.form.num_experts * layer.form.num_elements for layer in checkpoint.layers)
    hidden = 2 * size * options.max_tokens * checkpoint.spec.hidden_size
    if (needed := dense + layer + max(dense, layer) + hidden) > free:  # compares both, or rounds the next layer
        raise CapacityError(
            f"{count(free, 'B')} of free memory is too little for a replica of {checkpoint.name} in {dtype}, expected "
            f"{count(needed, 'B')} (dense weights {count(dense, 'B')}, experts of a layer {count(layer, 'B')}, the "
            f"larger of them twice, calibration {count(hidden, 'B')}); free memory, or --set dtype=bfloat16 or "
            "max_tokens=N"
        )
    parts = f"dense weights, experts of a layer, calibration; {count(free, 'B')} free"
    return replace(options, dtype=dtype), [
        ("device", "cpu", "replicas are rounded on the processor"),
        ("dtype", dtype, why),
        ("memory", count(needed, "B"), parts),
    ]


def require_replicable(checkpoint: Checkpoint, options: ReplicaOptions) -> None:
    """Check that a replica is possible, by config and headers only.

    Raises:
        UsageError: the family is unknown, pack-quantized cannot hold its layout, weights are packed, the group does not
            divide the weights' widths, or routed experts would have zero points.
        MismatchError: a weight file is missing or damaged, or lacks a tensor.
    """
    path = checkpoint.path
    require_family(checkpoint.config)
    if checkpoint.quantization:
        raise UsageError(f"{path} is already quantized; give the original model")
    if not options.symmetric:
        raise UsageError(
            "--asymmetric: transformers unpacks stacked experts without zero points, so it could not load the "
            "replica; leave it out, or --set dense_symmetric=false for attention, dense layers and shared "
            "experts only"
        )
    model, made_of = checkpoint.skeleton, checkpoint.sources
    moe = {layer.layer_id: layer for layer in checkpoint.layers}
    names = {id(module): name for name, module in model.named_modules()}
    prefix = f"{names[id(model.get_decoder().layers)]}."
    widths: set[int] = set()
    for number, layer in enumerate(model.get_decoder().layers):
        parameters = dict(layer.named_parameters())
        for local in rounded_names(layer, moe.get(number)):
            widths.add(parameters[local].shape[-1])
            _require_layout(path, f"{prefix}{number}.{local}", made_of)
    if any(width % options.group for width in widths):
        right = [str(group) for group in GROUPS if not any(width % group for width in widths)]
        raise UsageError(
            f"--group {options.group} does not divide the widths {', '.join(map(str, sorted(widths)))} of the weights, "
            f"expected one that does: {', '.join(right) or 'none of 16, 32, 64 and 128 does'}"
        )


def _require_layout(path: Path, name: str, made_of: Mapping[str, TensorSource]) -> None:
    """Raise UsageError for a computed weight, or for experts stored as one tensor."""
    if (source := made_of.get(name)) is None:
        raise MismatchError(f"{path} lacks {name}, or has another name for it; download the model again")
    stored = source.tensor_names
    stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    if stacked != (source.converter is not None) or not all(one.endswith(".weight") for one in stored):
        raise UsageError(
            f"{path} stores {name} as {stored[0]}, and pack-quantized holds single linear weights; save the model "
            "again with transformers' save_pretrained"
        )


def _check(made: Checkpoint, ids_1S: torch.Tensor, logits_SV: torch.Tensor | None) -> str:
    """Load the result by plain transformers, if it fits into memory unpacked; return the library that loaded it.

    transformers and moetool compute in float32, since coarser rounding resolves near ties of routers at random.

    Args:
        logits_SV: logits of moetool, if known.

    Raises:
        MismatchError: transformers lacks a tensor, or its logits differ from moetool's.
    """
    size = 4 * sum(parameter.numel() for parameter in made.skeleton.parameters())
    if 2 * size > memory_bytes()[1]:
        return "moetool"  # `judge` has read every tensor by its name and shape
    if logits_SV is None:
        logits_SV = logits_of(made, ids_1S, torch.float32)
    model = load_unpacked(made.path, torch.float32)
    with torch.no_grad():
        found_SV = model(input_ids=ids_1S, use_cache=False).logits[0]
    error = (found_SV - logits_SV).abs().max().item()
    if error > _AGREE * logits_SV.abs().max().item():
        raise MismatchError(
            f"transformers computes logits from {made.path} that differ by {error:.3g} from moetool's, expected at "
            f"most {_AGREE * logits_SV.abs().max().item():.3g}; the saved replica is wrong"
        )
    return "transformers"


def _readme(card: Mapping[str, Any], path: Path) -> str:
    how, judged, weights = card["quantization"], card["judged"], card["weights"]
    few = sum(len(experts) for experts in card["few_tokens"].values())
    return f"""# {card["spec"]["name"]} in {how["bits"]} bits

Attention and experts of {path.name} rounded to {how["bits"]} bits in groups of {how["group"]}
({"symmetric" if how["dense_symmetric"] else "asymmetric but for the routed experts"}), with activation-aware scales
(AWQ); embeddings, norms and gates are kept. Stored as compressed-tensors `pack-quantized`.

- Made by moetool {card["moetool_version"]} on {card["tokens"]["train"]:,} tokens of {", ".join(card["datasets"])}.
- On {judged["tokens"]:,} tokens of other prompts: KL divergence {judged["kl"]:.5f} nats, the same next token for
  {percent(judged["top1"])}, {percent(judged["match"])} of the experts that the gates choose.
- {weights["bytes"]:,} bytes; the model has {weights["of_bytes"]:,}.
- {few} experts saw fewer than {how["min_tokens"]} tokens, and their columns were not scaled.
- Loaded again by {card["reloaded_by"]}, with no tensor missing.
"""
