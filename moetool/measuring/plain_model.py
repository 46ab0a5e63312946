"""Plain transformers as the oracle: the whole model in memory, or one decoder layer of it at a time.

Layer by layer, the forwards of all sequences run concurrently, each on its own thread, with a barrier before every
decoder layer. There the layer's weights are read, all sequences pass through it, and its memory is freed. Every family
therefore runs transformers' own forward, and its files are read once.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from moetool.base.errors import UsageError
from moetool.measuring.library_weights import OURS, WeightLibrary
from moetool.models.checkpoint import Checkpoint
from moetool.models.conversion import TensorSource
from moetool.models.experts.moe_layers import MoeLayer, moe_layers
from moetool.models.loading import complete, fill, load_full, transformers_unpacks


class Forward(NamedTuple):
    """One forward of a sequence.

    Attributes:
        first: position of the first kept logits.
        experts: transformers' experts implementation; None for the model's default.
    """

    tokens: Sequence[int]
    first: int
    experts: str | None = None


Visit = Callable[[int, int, Callable[[torch.Tensor], torch.Tensor]], None]
"""Called before a decoder layer: with the numbers of forward and layer, and the layer as a function of hidden states.

The function passes on the other arguments of that forward.
"""


class PlainModel:
    """A model in plain transformers.

    Args:
        model: transformers' model; streamed decoder layers are on the meta device.
        origin: the library that loaded its weights, for reports.
        read_by: the reader of each part: `config`, and those of `WeightLibrary`.
        open_layer: loads the weights of a decoder layer; None for a model in memory.

    Attributes:
        decoder_layers: all decoder layers.
    """

    def __init__(
        self, model: Any, origin: str, read_by: dict[str, str], open_layer: "Callable[[int], Any] | None" = None
    ) -> None:
        self.model = model
        self.origin = origin
        self.read_by = read_by
        self.layers = moe_layers(model)
        self.decoder_layers = decoder_layers(model, self.layers)
        self._open_layer = open_layer

    @property
    def whole(self) -> bool:
        return self._open_layer is None

    def implementations(self) -> list[str]:
        """Return transformers' comparable experts implementations; empty where the family has only one."""
        with contextlib.suppress(Exception):  # families refuse in different ways
            for name in ("eager", "grouped_mm"):
                self.model.set_experts_implementation(name)
            return ["grouped_mm", "eager"]
        return []

    def run(
        self, forwards: Sequence[Forward], *, visit: Visit, on_layer: Callable[[int, nn.Module], None]
    ) -> list[torch.Tensor]:
        """Return the logits [T - first, V] float32 of each forward, on the CPU.

        Args:
            visit: as `Visit`.
            on_layer: called once for each decoder layer while its weights are in memory.

        Raises: as a forward does.
        """

        def before(number: int, layer: int, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
            if (experts := forwards[number].experts) is not None:
                self.model.set_experts_implementation(experts)
            visit(number, layer, call)

        def logits_of(number: int) -> torch.Tensor:
            forward = forwards[number]
            tokens = torch.tensor([list(forward.tokens)], device=self.model.device)
            keep = len(forward.tokens) - forward.first
            logits: torch.Tensor = self.model(tokens, use_cache=False, logits_to_keep=keep).logits[0]
            return logits[-keep:].float().cpu()

        return self._side_by_side(len(forwards), logits_of, before, on_layer)

    def _side_by_side(
        self,
        count: int,
        compute: Callable[[int], torch.Tensor],
        visit: Visit,
        on_layer: Callable[[int, nn.Module], None],
    ) -> list[torch.Tensor]:
        """Return the results of `compute` for each number below `count`; all need equally many forwards.

        Args:
            visit: as `Visit`.
            on_layer: called for each decoder layer of a forward while its weights are in memory.
        """
        lock = threading.Lock()
        made: list[torch.Tensor | None] = [None] * count
        errors: list[BaseException] = []
        current = [-1]
        local = threading.local()

        def arrive() -> None:
            current[0] = (current[0] + 1) % len(self.decoder_layers)
            if self._open_layer is not None:
                self._open_layer(current[0])
            on_layer(current[0], self.decoder_layers[current[0]])

        barrier = threading.Barrier(count, action=arrive)

        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            barrier.wait()
            lock.acquire()
            local.inside = True
            visit(local.number, current[0], partial(_again, module, args, kwargs))

        def after(module: Any, args: Any, output: Any) -> None:
            if local.inside:  # not if the barrier broke before it
                local.inside = False
                lock.release()

        def run_one(number: int) -> None:
            local.number, local.inside = number, False
            try:
                with torch.inference_mode():
                    made[number] = compute(number)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        hooks = []
        for layer in self.decoder_layers:
            hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(layer.register_forward_hook(after, always_call=True))
        threads = [threading.Thread(target=run_one, args=(number,), daemon=True) for number in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for hook in hooks:
                hook.remove()
        if errors:
            raise errors[0]
        return [logits for logits in made if logits is not None]

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> list[torch.Tensor]:
        """Return the logits [num_tokens, V] float32 of greedy decoding with transformers' own cache, on the CPU, by
        prompt.

        Effects: for a streamed model, reads all weights once per token.
        """
        most = max(num_tokens)

        def logits_of(number: int) -> torch.Tensor:
            made = self.model.generate(
                torch.tensor([list(prompts[number])], device=self.model.device),
                max_new_tokens=most,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            return torch.stack([step[0] for step in made.logits[: num_tokens[number]]]).float().cpu()

        return self._side_by_side(len(prompts), logits_of, lambda *visited: None, lambda *layer: None)


def decoder_layers(model: Any, layers: Sequence[MoeLayer]) -> list[nn.Module]:
    """Return the decoder layers of a model, in order. Raises: UsageError: they are not in one list."""
    return list(model.get_submodule(_list_name(model, layers)))


def _list_name(model: Any, layers: Sequence[MoeLayer]) -> str:
    found = re.match(r"(.+?)\.\d+\.", layers[0].path)
    name = found[1] if found else ""
    if not isinstance(model.get_submodule(name), nn.ModuleList):
        raise UsageError(f"{type(model).__name__} does not keep its decoder layers in a list; it cannot be verified")
    return name


def plain_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the bytes of the whole model in memory, experts included."""
    return sum(parameter.numel() for parameter in checkpoint.skeleton.parameters()) * dtype.itemsize


def open_plain(
    checkpoint: Checkpoint, library: WeightLibrary, dtype: torch.dtype, device: torch.device, *, whole: bool
) -> PlainModel:
    """Open a model in plain transformers; a quantized one with unpacked weights.

    Args:
        library: reads what transformers does not.
        whole: load the whole model, by transformers if possible; else one decoder layer at a time.

    Raises: as `moetool.models.loading.load_full`.
    """
    if not whole:
        return _open_streamed(checkpoint, library, dtype, device)
    quantization = checkpoint.quantization
    by_transformers = {**library.read_by, **dict.fromkeys(("config", "files", "names", "numbers"), "transformers")}
    if quantization is None and checkpoint.stands_alone:
        return PlainModel(load_full(checkpoint, dtype, device).model, "loaded by transformers", by_transformers)
    dequantizes = quantization is not None and quantization.method in ("fp8", "mxfp4") and checkpoint.stands_alone
    if dequantizes and find_spec("accelerate") is not None:
        model = _dequantized(checkpoint, dtype, device)
        read_by = by_transformers | {"unpacking": "transformers"}
        return PlainModel(model, "unpacked by transformers (dequantize=True)", read_by)
    if transformers_unpacks(checkpoint):
        model = load_full(checkpoint, dtype, device).model
        if hasattr(model, "hf_quantizer"):
            read_by = by_transformers | {"unpacking": "compressed-tensors"}
            return PlainModel(model, "unpacked by compressed-tensors", read_by)
    model = checkpoint.empty_model(dtype)
    fill(model, checkpoint.sources.values(), checkpoint, library.read, dtype, device)
    complete(model, (), checkpoint)
    return PlainModel(model, _origin(library), {"config": OURS, **library.read_by})


def _origin(library: WeightLibrary) -> str:
    """How a library reads the weights, for reports."""
    if library.read_by.get("unpacking") == OURS:
        return "unpacked by moetool: transformers does not unpack this format here"
    return f"{'unpacked' if 'unpacking' in library.read_by else 'read'} by {library.name}"


def _dequantized(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    raw = dict(checkpoint.raw["quantization_config"])
    config = Mxfp4Config(dequantize=True)
    if raw["quant_method"] == "fp8":
        config = FineGrainedFP8Config(dequantize=True, weight_block_size=tuple(raw["weight_block_size"]))
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.path, dtype=dtype, quantization_config=config, trust_remote_code=False
    )
    return model.to(dtype).eval().to(device)


def _open_streamed(
    checkpoint: Checkpoint, library: WeightLibrary, dtype: torch.dtype, device: torch.device
) -> PlainModel:
    model = checkpoint.empty_model(dtype)
    name = _list_name(model, moe_layers(model))
    sources: dict[int | None, list[TensorSource]] = {}
    for source in checkpoint.sources.values():
        found = re.match(rf"{re.escape(name)}\.(\d+)\.", source.parameter)
        sources.setdefault(int(found[1]) if found else None, []).append(source)
    inside = {key for key in model.state_dict() if re.match(rf"{re.escape(name)}\.\d+\.", key)}
    fill(model, sources.get(None, []), checkpoint, library.read, dtype, device)
    complete(model, inside, checkpoint)
    opened: list[int] = []

    def open_layer(number: int) -> None:
        while opened:
            _free(model, {key for key in inside if key.startswith(f"{name}.{opened[-1]}.")})
            opened.pop()
        opened.append(number)
        fill(model, sources.get(number, []), checkpoint, library.read, dtype, device)

    return PlainModel(model, _origin(library), {"config": OURS, **library.read_by}, open_layer)


def _free(model: Any, names: Iterator[str] | set[str]) -> None:
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        places = module._parameters if leaf in module._parameters else module._buffers
        value = places[leaf]
        empty = torch.empty_like(value, device="meta")
        places[leaf] = nn.Parameter(empty, requires_grad=False) if leaf in module._parameters else empty


def _again(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor) -> torch.Tensor:
    """Return a decoder layer as a function of other hidden states."""
    if args:
        output = module.forward(hidden, *args[1:], **kwargs)
    else:
        output = module.forward(**{**kwargs, "hidden_states": hidden})
    return output[0] if isinstance(output, tuple) else output
