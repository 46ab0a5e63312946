"""Load a model: whole, or without its routed experts."""

import contextlib
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from moetool.base.errors import CapacityError, MismatchError, UsageError, first_line, unknown_name
from moetool.base.types import ForwardInfo, ModelSpec
from moetool.kernels import norms
from moetool.kernels.cpu import gates, matmul
from moetool.models.checkpoint import Checkpoint
from moetool.models.conversion import TensorSource
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.experts.moe_layers import MoeLayer, moe_layers, offloaded
from moetool.models.files.tensor_index import FLOATS, read_index
from moetool.models.packed_linear import PackedLinear
from moetool.models.shards import Shards
from moetool.models.stored_embedding import StoredEmbedding
from moetool.models.transformers_internals import initialize, wide_parameters
from moetool.models.weights.pack_quantized import PackQuantized
from moetool.models.weights.packed import PACKED

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")
CPU = torch.device("cpu")


class ExpertPool(Protocol):
    """Computes experts that are not in memory."""

    def begin_forward(self, info: ForwardInfo) -> None: ...
    def end_forward(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: transformers' own model object.
        layers: its MoE layers, in order.
        files: reads its experts; None if the experts are in memory.
        pool: computes experts that are not in memory; every forward must be announced to it.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    model: Any
    layers: list[MoeLayer]
    files: ExpertFiles | None
    pool: ExpertPool | None = None
    device: torch.device = CPU

    def begin_forward(self, info: ForwardInfo) -> None:
        """Announce the next forward."""
        if self.pool is not None:
            self.pool.begin_forward(info)

    def end_forward(self) -> None:
        """End the forward, complete or not."""
        if self.pool is not None:
            self.pool.end_forward()

    def close(self) -> None:
        """End the pool's threads and close the expert files."""
        if self.pool is not None:
            self.pool.close()
        if self.files is not None:
            self.files.shards.close()


def served_dtype(checkpoint: Checkpoint, device: torch.device) -> tuple[str, str]:
    """Data type in which a server computes unless told otherwise, and the reason."""
    declared = checkpoint.declared_dtype
    if declared == torch.float16 and device.type == "cpu":
        return "float32", "processors compute float16 slowly"
    return next((name for name, known in DTYPES.items() if known == declared), "bfloat16"), "from the checkpoint"


def parse_dtype(name: str) -> torch.dtype:
    """A data type by name. Raises: UsageError: the name is not a supported data type."""
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name]


def available_device() -> str:
    """The device to compute on unless another is set: `cuda` if torch sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_kind(name: str) -> torch.device:
    """Parse a device name for another machine, which may have GPUs where this one has none.

    Raises:
        UsageError: the name is unknown.
    """
    if name not in DEVICES:
        raise UsageError(f"unknown device {name!r}: known are {', '.join(DEVICES)}")
    return torch.device(name)


def parse_device(name: str, first: int = 0) -> torch.device:
    """Parse a device name: `cpu`, or `cuda` for the first GPU.

    Args:
        first: number of the first GPU; those beyond the last one begin again with 0.

    Raises:
        UsageError: the name is unknown, or torch sees no GPU.
    """
    if device_kind(name) == CPU:
        return CPU
    if not torch.cuda.is_available():
        raise UsageError(
            f"--device cuda: torch {torch.__version__} finds no usable GPU; 'moetool doctor' shows this "
            "machine's devices; omit --device to run on the CPU"
        )
    return torch.device("cuda", first % torch.cuda.device_count())


def parse_devices(name: str, count: int, first: int = 0) -> list[torch.device]:
    """Return this number of devices: GPUs from the first on, or the CPU repeated; for one see `parse_device`.

    Args:
        first: as for `parse_device`.

    Raises:
        UsageError: the name is unknown, or torch can use fewer GPUs.
    """
    device = parse_device(name, first)
    if device.type != "cuda" or count == 1:
        return [device] * count
    if (found := torch.cuda.device_count()) < count:
        gpus = "1 GPU" if found == 1 else f"{found} GPUs"
        raise UsageError(
            f"devices is {count}, but torch can use {gpus}; 'moetool doctor' shows this machine's devices; "
            "set fewer devices"
        )
    return [torch.device("cuda", (first + index) % found) for index in range(count)]


def use_threads(config: Any, threads: int = 0) -> int:
    """Set torch's number of compute threads; returns it.

    Args:
        threads: 0: automatic: one for a narrow model, whose products are too small to split, else torch's default.
    """
    if threads == 0 and config.hidden_size < 1024:
        threads = 1
    if threads:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def load_full(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = CPU) -> LoadedModel:
    """Load the whole plain model, experts included, onto a device.

    Raises:
        CapacityError: the device lacks the memory.
        MismatchError: a tensor is missing or has another shape than the config says.
    """
    path = checkpoint.path
    if not checkpoint.stands_alone or (checkpoint.quantization is not None and not transformers_unpacks(checkpoint)):
        return _load_stacked(checkpoint, dtype, device)
    spec = checkpoint.spec
    if checkpoint.quantization is not None:
        try:
            model = load_unpacked(path, dtype)
        except MismatchError:  # transformers does not convert packed experts of all families
            return _load_stacked(checkpoint, dtype, device)
    else:  # tensors of other parts, such as prediction layers and vision towers, may remain
        try:
            model = _from_pretrained(path, dtype, _MISSING).eval()
        except MismatchError:
            checkpoint.expert_files().shards.close()  # its error names the file and the tensor
            raise
    try:
        model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{path} with all its experts does not fit on {device} ({first_line(error)}); free memory there"
        ) from None
    return LoadedModel(
        checkpoint=checkpoint, spec=spec, model=model, layers=moe_layers(model), files=None, device=device
    )


def transformers_unpacks(checkpoint: Checkpoint) -> bool:
    """Whether transformers loads a checkpoint's quantized weights correctly on every machine.

    It does not for some pack-quantized ones: it unpacks stacked experts without zero points, and does not stack
    unquantized experts beside packed weights.
    """
    if checkpoint.quantization is None or not checkpoint.stands_alone:
        return False
    formats = checkpoint.quantization.formats
    names = checkpoint.index.tensors
    return all(isinstance(format, PackQuantized) and format.symmetric for format in formats) and any(
        ".experts." in name and name.endswith(PACKED) for name in names
    )


def _load_stacked(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Load a plain model that transformers cannot load itself: quantized, or part of another model."""
    with contextlib.closing(load_lazy(checkpoint, dtype, device, whole_embeddings=True)) as loaded:
        assert loaded.files is not None
        for layer in loaded.layers:
            for part, stacked in zip(layer.form.parts, loaded.files.stacked(layer, dtype).values(), strict=True):
                for name, share in zip(part.parameters, stacked.chunk(len(part.parameters), dim=1), strict=True):
                    place, _, leaf = name.rpartition(".")
                    module = layer.experts.get_submodule(place)
                    weight = share.reshape(module.get_parameter(leaf).shape).to(device)
                    module._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
    return replace(loaded, files=None)


def load_unpacked(path: Path, dtype: torch.dtype) -> Any:
    """Load packed weights with plain transformers, unpacked at once instead of at the first forward.

    Raises:
        MismatchError: transformers misses a tensor, has an extra one, or would initialize one.
    """
    model = _from_pretrained(path, dtype, ("unexpected_keys", *_MISSING))
    if hasattr(model, "hf_quantizer"):
        stored = read_index(path).tensors
        for name, parameter in model.named_parameters():
            if name.endswith("_scale") and name in stored:  # the library unpacks in the type of the stored scales
                parameter.data = parameter.data.to(FLOATS[stored[name].dtype])
        with contextlib.redirect_stderr(io.StringIO()):
            model.hf_quantizer.compressor.decompress_model(model)
    return model.to(dtype).eval()  # experts would keep the type of their scales


_MISSING = ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors")
"""Kinds of its loading report: tensors that it would initialize at random with only a warning."""
_REFUSALS = (RuntimeError, ValueError, AssertionError, LookupError, TypeError, AttributeError)
"""Exceptions of transformers on unchecked files."""

_SHAPES = re.compile(
    r"^(\S.*?) +\| *MISMATCH .*ckpt: torch\.Size\((.+?)\) vs model: ?torch\.Size\((.+?)\)", re.MULTILINE
).findall
"""Name, shape in the files and shape in the model of each mismatch in its loading report."""


def _from_pretrained(path: Path, dtype: torch.dtype, refused: Collection[str]) -> Any:
    """Load a checkpoint with transformers.

    Args:
        refused: kinds of its loading report that must be empty.

    Raises:
        MismatchError: one is not empty, or transformers refuses the files.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    report = io.StringIO()
    try:
        with _reported(report), contextlib.redirect_stderr(io.StringIO()):  # it prints its own progress bars
            model, info = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, trust_remote_code=False, output_loading_info=True
            )
    except _REFUSALS as error:
        text = re.sub(r"\x1b\[[\d;]*m", "", report.getvalue())
        reasons = re.findall(r"^\w+Error: (.+)$", text, re.MULTILINE)
        reasons += [
            f"{name} is {found} in its files, and {built} by its config" for name, found, built in _SHAPES(text)
        ]
        raise MismatchError(f"transformers cannot load {path}: {[*reasons, first_line(error)][0]}") from error
    for kind in refused:
        if found := sorted(map(str, info.get(kind) or ())):
            raise MismatchError(
                f"transformers loads {path} with {len(found)} {kind.replace('_', ' ')}, such as {found[0]}, "
                "expected none; download the model again"
            )
    return model


@contextlib.contextmanager
def _reported(into: io.StringIO) -> Iterator[None]:
    """Collect transformers' loading reports, which its exceptions only refer to."""
    import logging

    everything, logger = logging.getLogger("transformers"), logging.getLogger("transformers.modeling_utils")
    before, handler = (everything.level, logger.level, logger.propagate), logging.StreamHandler(into)
    everything.setLevel(logging.ERROR)
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        everything.setLevel(before[0])
        logger.setLevel(before[1])
        logger.propagate = before[2]


def load_lazy(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device = CPU,
    products: bool = False,
    packed_linears: bool | None = None,
    whole_embeddings: bool = False,
) -> LoadedModel:
    """Load a model without its routed experts onto a device.

    The experts' parameters stay on the meta device; the runtime replaces them by an experts implementation (see
    `moetool.runtime.experts.forward`).

    Args:
        products: slots hold quantized experts in the form that computes fastest on this CPU (`ExpertFiles`). Only this
            machine can use such slots.
        packed_linears: keep weights of linear layers packed if the CPU multiplies them packed (`PackedLinear`; default:
            as `products`).
        whole_embeddings: load all embeddings, even if their rows could be read from the files.

    Effects: keeps files open until `LoadedModel.close` or `Checkpoint.close`. On a CPU, linear layers with bfloat16
        weights compute few rows by `moetool.kernels.cpu.matmul`. Large embeddings stay in the files; beside a GPU all
        but the input embedding.

    Raises:
        MismatchError: weight files and config do not match.
    """
    from transformers import GenerationConfig

    files = checkpoint.expert_files(fastest=dtype if products and device.type == "cpu" else None)
    try:
        model = checkpoint.empty_model(dtype)
        layers = moe_layers(model)
        if not whole_embeddings:
            _leave_embeddings(model, checkpoint, files.shards, dtype, device)
        if device.type == "cpu" and (products if packed_linears is None else packed_linears):
            _keep_packed(model, checkpoint, files.shards, dtype)
        _fill(model, checkpoint, files.shards, dtype, device)
        files.shards.drop_buffer()  # as large as an output head
        if device.type == "cpu":
            matmul.adopt(model, [layer.router for layer in layers])
            gates.find_gate_kernel()  # no request waits for the compiler
        norms.adopt(model)
        if (checkpoint.path / "generation_config.json").is_file():
            try:
                model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
            except (OSError, *_REFUSALS) as error:
                file = checkpoint.path / "generation_config.json"
                raise MismatchError(f"cannot read {file}: {first_line(error)}; download the model again") from None
    except BaseException:
        files.shards.close()
        raise
    return LoadedModel(
        checkpoint=checkpoint, spec=checkpoint.spec, model=model, layers=layers, files=files, device=device
    )


def _leave_embeddings(
    model: Any, checkpoint: Checkpoint, shards: Shards, dtype: torch.dtype, device: torch.device
) -> None:
    """Replace large embeddings by ones that read their rows from the weight files, where possible."""
    for name, stored in checkpoint.stored_embeddings(dtype, device.type).items():
        model.set_submodule(name, StoredEmbedding(checkpoint.weight_index, stored, dtype, device, shards.stop))


def _keep_packed(model: Any, checkpoint: Checkpoint, shards: Shards, dtype: torch.dtype) -> None:
    """Replace linear layers by ones that keep their weights packed, where possible."""
    for name, stored in checkpoint.packed_linears(dtype).items():
        model.set_submodule(name, PackedLinear(stored, shards, model.get_submodule(name).bias))


def _fill(model: Any, checkpoint: Checkpoint, shards: Shards, dtype: torch.dtype, device: torch.device) -> None:
    """Load all tensors except the experts from the meta device.

    Raises:
        MismatchError: a tensor is missing or has another shape than the config says.
    """
    experts = offloaded(checkpoint.layers)
    kinds = StoredEmbedding | PackedLinear
    stored = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, kinds)}
    wanted = [source for source in checkpoint.sources.values() if source.parameter not in experts | stored]
    fill(model, wanted, checkpoint, shards.load, dtype, device)
    complete(model, experts, checkpoint)


ReadWeight = Callable[[str, torch.dtype], torch.Tensor]
"""Returns a weight by its name in an unquantized checkpoint; in this data type if it is unpacked."""


def fill(
    model: Any,
    wanted: Iterable[TensorSource],
    checkpoint: Checkpoint,
    read: ReadWeight,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> None:
    """Load parameters and buffers of a model from `Checkpoint.empty_model`.

    Args:
        wanted: sources of these parameters and buffers.
        read: reads their tensors.

    Raises:
        MismatchError: a tensor has another shape than the config says.
    """
    parameters = model.state_dict()
    wide = wide_parameters(model, dtype)
    for source in wanted:
        kind = torch.float32 if any(part in source.parameter for part in wide) else parameters[source.parameter].dtype
        tensors = {name: read(name, kind).to(kind) for name in source.tensor_names}
        index = checkpoint.weight_index
        file = index.file_of(index.weights[next(iter(tensors))])
        try:
            converted = source.convert(tensors, model)
        except MismatchError as error:
            raise MismatchError(f"{file}: {error}; download the model again") from None
        for name, value in converted.items():
            parameter = parameters.get(name)
            if parameter is None or value.shape != parameter.shape:
                expected = None if parameter is None else list(parameter.shape)
                raise MismatchError(
                    f"{file}: {name} has shape {list(value.shape)}, expected {expected} by the config; correct the "
                    "config, or download the model again"
                )
            _put(model, name, value.to(device))


def complete(model: Any, absent: Collection[str], checkpoint: Checkpoint) -> None:
    """Tie weights and compute buffers that no tensor holds, once everything else is loaded.

    Args:
        absent: parameters and buffers that stay on the meta device.

    Raises:
        MismatchError: another tensor is still on the meta device.
    """
    device, path = next(p.device for p in model.parameters() if not p.is_meta), checkpoint.path
    for name, numbers in checkpoint.header_buffers.items():
        _put(model, name, torch.tensor(numbers))
    unfilled = {name for name, value in model.state_dict().items() if value.is_meta}
    model.tie_weights(missing_keys=unfilled, recompute_mapping=False)  # those of `Checkpoint.skeleton`
    missing = [name for name, value in model.state_dict().items() if value.is_meta and name not in absent]
    if missing:
        raise MismatchError(
            f"{missing[0]} is missing from the weight files of {path}, or they name it otherwise; download the model "
            "again"
        )
    _compute_buffers(model, absent, path)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _put(model: Any, name: str, value: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._buffers:
        module.register_buffer(leaf, value)
    else:
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    getattr(module, leaf)._is_hf_initialized = True  # transformers' initializers skip it


def _compute_buffers(model: Any, absent: Collection[str], path: Path) -> None:
    """Compute the buffers that no file holds (rotary frequencies, decays, scales).

    Like transformers, it computes them on the CPU, so that they are the same on every device.
    """
    missing = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in absent]
    owners = {}
    for name in missing:
        owner, _, leaf = name.rpartition(".")
        module = owners[owner] = model.get_submodule(owner)
        value = torch.empty_like(module._buffers[leaf], device="cpu")
        if value.is_floating_point():
            value.fill_(torch.nan)
        module.register_buffer(leaf, value, persistent=False)
    with torch.no_grad():
        for module in owners.values():
            initialize(model, module)
    for name in missing:
        if model.get_buffer(name).isnan().any():
            raise MismatchError(f"{name} is in no weight file of {path}, and transformers does not compute it")
