"""The layers of a replica, built one by one in a folder from which a killed run resumes.

made_from.json        inputs and options of the replica; a folder with other inputs is refused
model-*.safetensors   the finished layers in their final form
layer-*.json          the chosen exponents of each layer
hidden.safetensors    the next layer's number, and its input on the calibration tokens
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moetool import __version__
from moetool.base import durable
from moetool.base.config import Span, require_within
from moetool.base.errors import MoetoolError, UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy, parse_dtype
from moetool.models.weights.packed import Scheme, quantization_config, to_tensors
from moetool.training.quantize.calibration import Calibration
from moetool.training.quantize.folding import ScaleFold, folds_of, rounded_names
from moetool.training.quantize.layer_forward import Layerwise
from moetool.training.quantize.scale_search import Inputs, SearchOptions, round_clipped, search, watch_inputs
from moetool.training.quantize.soundness import require_finite, require_finite_weights

_RECORD = "made_from.json"
_TOKENIZER = ("tokenizer*", "special_tokens*", "added_tokens*", "vocab*", "merges*", "chat_template*", "generation_*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Options of a replica.

    Attributes:
        bits: bits of each rounded weight.
        group: number of inputs that share a scale.
        symmetric: whether the zero points of routed experts are 0; required (`require_replicable`), since transformers
            does not read others.
        dense_symmetric: whether the zero points of attention, dense layers and shared experts are 0.
        dtype: compute data type of the layers; float32 takes twice the memory of bfloat16.
        grid, clip, min_tokens: as in `SearchOptions`; grid=0 and clip=false round to nearest.
        length: tokens of a calibration block, at most the model's context.
        max_tokens: maximum calibration tokens.
    """

    bits: int = 4
    group: int = 64
    symmetric: bool = True
    dense_symmetric: bool = True
    dtype: str = "float32"
    grid: int = 20
    clip: bool = True
    min_tokens: int = 32
    length: int = 256
    max_tokens: int = 32768

    def __post_init__(self) -> None:
        Scheme(bits=self.bits, group=self.group)
        require_within(self, grid=Span(0), min_tokens=Span(1), length=Span(2), max_tokens=Span(1))

    @property
    def scheme(self) -> Scheme:
        """Return the scheme of linear modules."""
        return Scheme(bits=self.bits, group=self.group, symmetric=self.dense_symmetric)

    @property
    def experts(self) -> Scheme:
        return Scheme(bits=self.bits, group=self.group, symmetric=self.symmetric)


class ReplicaProgress:
    """State of an unfinished replica."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, calibration: Calibration, options: ReplicaOptions) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.options = options
        self._calibration = calibration
        self.spec = checkpoint.spec
        self._made_from = json.dumps(
            {
                "revision": self.spec.revision,
                "options": asdict(options),
                "version": __version__,
                "tokens": calibration.ids_NS.tolist(),
            }
        )
        self._require_own_folder()
        self._made_of = checkpoint.sources
        self._scale_dtype = checkpoint.expert_dtype
        self._loaded = load_lazy(checkpoint, parse_dtype(options.dtype))
        assert self._loaded.files is not None
        self._shards = self._loaded.files.shards
        self._run = Layerwise(self._loaded)
        decoder = self._loaded.model.get_decoder()
        names = {id(module): name for name, module in self._loaded.model.named_modules()}
        self._prefix = f"{names[id(decoder.layers)]}."
        self.num_layers = len(self._run.layers)
        self._search = SearchOptions(grid=options.grid, clip=options.clip, min_tokens=options.min_tokens)

    def close(self) -> None:
        self._loaded.close()

    def layers(self, report: Callable[[int], None]) -> list[dict[str, Any]]:
        """Build and write every missing layer; return the notes of each layer.

        Effects: writes nothing before all weights and the first layer's activations are found finite. Activations of a
        later layer that are not finite remove the written layers.
        """
        first, hidden = self._resume()
        report(first)
        if hidden is None:
            require_finite_weights(self._shards, self.checkpoint.path)
        inputs = self._run.begin(self._calibration.ids_NS)
        require_finite(inputs, "before the first layer")
        hidden = inputs if hidden is None else hidden
        for number in range(first, self.num_layers):
            if number > first:
                report(number)
            with self._run.experts(number):
                hidden, note = self._layer(number, hidden)
            durable.write_text(self.folder / f"layer-{number:05d}.json", json.dumps(note))
            state = self.folder / "hidden.safetensors.new"
            save_file({"hidden": torch.cat(hidden)}, state, metadata={"next": str(number + 1)})
            durable.sync(state)
            state.replace(self.folder / "hidden.safetensors")
        report(self.num_layers)
        return [
            json.loads((self.folder / f"layer-{number:05d}.json").read_text(encoding="utf-8"))
            for number in range(self.num_layers)
        ]

    def finish(self, staged: Path) -> None:
        """Write the layers and all other files into the result's folder."""
        rest: dict[str, torch.Tensor] = {}
        for name, source in self._made_of.items():
            if not name.startswith(self._prefix):
                for stored in source.tensor_names:
                    rest[stored] = self._shards.load(stored)
        save_file(rest, self._shard(self.num_layers), metadata={"format": "pt"})
        weight_map: dict[str, str] = {}
        total = 0
        for number in range(self.num_layers + 1):
            file = self._shard(number)
            try:
                (staged / file.name).hardlink_to(file)
            except OSError:  # a file system without hard links
                shutil.copyfile(file, staged / file.name)
            with safe_open(file, "pt") as tensors:
                weight_map |= dict.fromkeys(tensors.keys(), file.name)
            total += file.stat().st_size
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (staged / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
        quantization = quantization_config(self.options.scheme, self._ignored(), self.options.experts)
        config = {**self.checkpoint.raw, "quantization_config": quantization}
        (staged / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        for pattern in _TOKENIZER:
            for file in self.checkpoint.path.glob(pattern):
                shutil.copyfile(file, staged / file.name)

    def _require_own_folder(self) -> None:
        """Raise UsageError if the folder holds anything except this run's layers."""
        record = self.folder / _RECORD
        if record.is_file() and record.read_text(encoding="utf-8") == self._made_from:
            return
        if self.folder.is_dir() and any(self.folder.iterdir()):
            what = "the layers of a run with other flags, data or version" if record.is_file() else "other files"
            raise UsageError(
                f"{self.folder} holds {what}; continue with the same flags, or remove it: rm -r {self.folder}"
            )

    def _resume(self) -> tuple[int, list[torch.Tensor] | None]:
        """Return the first missing layer, and its input."""
        state = self.folder / "hidden.safetensors"
        if not state.is_file():
            return 0, None
        with safe_open(state, "pt") as stored:
            return int(stored.metadata()["next"]), list(stored.get_tensor("hidden").split(1))

    def _layer(self, number: int, hidden: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Choose and fold the scales of one layer, then round and write it."""
        layer, moe = self._run.layers[number], self._run.moe.get(number)
        folds = folds_of(layer, moe, self._loaded.model.config.get_text_config())
        rounded = rounded_names(layer, moe)
        schemes = {name: self.options.experts if ".experts." in name else self.options.scheme for name in rounded}
        outputs: list[torch.Tensor] = []
        inputs = watch_inputs(
            layer, moe, folds, lambda: outputs.extend(self._run.run(number, state) for state in hidden), self._search
        )
        try:
            require_finite(outputs, f"after layer {number}")
        except MoetoolError:
            shutil.rmtree(self.folder, ignore_errors=True)  # a resumed run would fail here again
            raise
        if not (self.folder / _RECORD).is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            durable.write_text(self.folder / _RECORD, self._made_from)
        note: dict[str, Any] = {"layer": number, "alpha": {}, "few_tokens": []}
        chosen: list[tuple[ScaleFold, torch.Tensor]] = []
        for fold in folds:
            scale_C, note["alpha"][fold.name] = search(layer, fold, inputs, schemes, self._scale_dtype, self._search)
            chosen.append((fold, scale_C))
        if inputs.tokens_E is not None:
            note["few_tokens"] = (inputs.tokens_E < self.options.min_tokens).nonzero().flatten().tolist()
        parameters = {name: parameter.data for name, parameter in layer.named_parameters()}
        changed: set[str] = set()
        squares: dict[str, torch.Tensor] = {}
        for fold, scale_C in chosen:
            fold.apply(parameters, scale_C)
            changed |= {name for name, _ in fold.before} | set(fold.plain)
            squares |= _squares(fold, inputs, scale_C)
        self._write(number, parameters, schemes, changed, squares)
        return outputs, note

    def _write(
        self,
        number: int,
        parameters: Mapping[str, torch.Tensor],
        schemes: Mapping[str, Scheme],
        changed: set[str],
        squares: Mapping[str, torch.Tensor],
    ) -> None:
        tensors: dict[str, torch.Tensor] = {}
        prefix = f"{self._prefix}{number}."
        for name, source in self._made_of.items():
            if not name.startswith(prefix):
                continue
            local = name.removeprefix(prefix)
            square = squares.get(local) if self.options.clip else None
            if local not in schemes:
                stored = source.tensor_names[0]
                # Norms and gates with a folded scale keep full precision.
                tensors[stored] = parameters[local].float().clone() if local in changed else self._shards.load(stored)
                continue
            scheme, bits = schemes[local], self.options.bits
            if source.converter is None:
                stored = source.tensor_names[0]
                made = round_clipped(parameters[local], scheme, self._scale_dtype, square)
                tensors |= to_tensors(stored, made, bits)
                continue
            patterns = source.converter.source_patterns
            for expert, weight in enumerate(parameters[local]):
                mine = None if square is None else square if square.dim() == 1 else square[expert]
                for pattern, part in zip(patterns, weight.chunk(len(patterns)), strict=True):
                    made = round_clipped(part, scheme, self._scale_dtype, mine)
                    tensors |= to_tensors(source.names[pattern][expert], made, bits)
        partial = self.folder / "shard.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        durable.sync(partial)
        partial.replace(self._shard(number))

    def _shard(self, number: int) -> Path:
        return self.folder / f"model-{number + 1:05d}-of-{self.num_layers + 1:05d}.safetensors"

    def _ignored(self) -> list[str]:
        """Return linear modules that are not rounded, by the names of transformers and the checkpoint."""
        found = {"lm_head"}
        for number, moe in self._run.moe.items():
            prefix = f"{self._prefix}{number}."
            for name, parameter in self._run.layers[number].named_parameters():
                if parameter is moe.router.weight or name.endswith("shared_expert_gate.weight"):
                    stored = self._made_of[prefix + name].tensor_names[0]
                    for full in (prefix + name, stored):
                        short = re.sub(r".*\.\d+\.", "", full).removesuffix(".weight")
                        found.add(rf"re:.*\.{re.escape(short)}$")
        return sorted(found)


def _squares(fold: ScaleFold, inputs: Inputs, scale_C: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mean square of the scaled inputs of each weight with a folded scale."""
    scale_I = fold.spread(scale_C)
    if fold.inspect == "experts":
        return {fold.readers[0]: inputs.square["down"] / scale_I**2}
    found = {}
    for name in fold.readers:
        whole = inputs.square["up" if ".experts." in name else fold.inspect]
        found[name] = whole / scale_I**2
    return found
