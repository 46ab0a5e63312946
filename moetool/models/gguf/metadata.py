"""Values of GGUF headers, and the counts that their tensors give."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

SOFTMAX, SIGMOID, SQUARE_ROOT = 1, 2, 4
"""Score functions of routers by ggml's numbers; the last is the square root of a softplus."""


class Metadata:
    """Values of a header, by keys below its architecture.

    Args:
        values: all header values.
        shapes: shapes of the tensors, by name.
        rope_factors: the numbers of `rope_freqs.weight`; empty: the file has none, or is only a header.
    """

    def __init__(
        self,
        architecture: str,
        values: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        rope_factors: Sequence[float] = (),
    ) -> None:
        self.architecture = architecture
        self.rope_factors = rope_factors
        self.values = values
        self.shapes = shapes
        self.names = shapes.keys()

    def __call__(self, key: str) -> Any:
        """Return a value. Raises: KeyError: it is missing."""
        return self.values[f"{self.architecture}.{key}"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def has(self, leaf: str) -> bool:
        """Whether any layer has this tensor."""
        return any(_leaf(name) == leaf for name in self.names)

    def layers_with(self, leaf: str) -> list[bool]:
        """Whether each layer has this tensor."""
        return [f"blk.{layer}.{leaf}" in self.names for layer in range(self.num_layers)]

    @functools.cached_property
    def num_layers(self) -> int:
        """Decoder layers, counted from the tensors: blocks without multi-token prediction (`nextn.*`).

        Raises: ValueError: one is missing, or a prediction block is not behind them.
        """
        layers = sum(not predicting for predicting in self._blocks.values())
        for number in range(layers):
            if self._blocks.get(number, True):
                problem = "is a prediction block (nextn)" if number in self._blocks else "is missing"
                raise ValueError(f"blk.{number} {problem}, expected {layers} layers in front of all prediction blocks")
        return layers

    @functools.cached_property
    def _blocks(self) -> dict[int, bool]:
        """Numbers of the blocks, and whether each is a multi-token prediction block."""
        found: dict[int, bool] = {}
        for name in self.names:
            if leaf := _leaf(name):
                number = int(name.split(".", 2)[1])
                found[number] = found.get(number, False) or leaf.startswith("nextn.")
        return found

    @functools.cached_property
    def num_experts(self) -> int:
        """Routed experts of a layer, counted from the routers and the stacked experts.

        Raises: ValueError: tensors differ.
        """
        counted = {
            name: shape[0]
            for name, shape in self.shapes.items()
            if _counts_experts(_leaf(name)) and int(name.split(".")[1]) < self.num_layers
        }
        if not counted:
            raise ValueError("it holds neither a router (ffn_gate_inp) nor stacked experts (ffn_*_exps)")
        (first, expected), *others = sorted(counted.items())
        for name, count in others:
            if count != expected:
                raise ValueError(f"{name} is of {count} experts, expected {expected} as {first}")
        return expected

    def contradictions(self) -> list[str]:
        """Counts that the header gives and the tensors contradict.

        Raises: ValueError: the tensors lack layers of the header.
        """
        blocks, predicting = int(self("block_count")), int(self.get("nextn_predict_layers", 0))
        found = []
        if (layers := blocks - predicting) != self.num_layers:
            said = f"{layers} layers (block_count {blocks}, nextn_predict_layers {predicting})"
            if layers > self.num_layers and blocks != len(self._blocks):
                raise ValueError(f"its header counts {said}, but it holds tensors of {self.num_layers}")
            found.append(f"{said}, its tensors {self.num_layers}")
        if (experts := int(self("expert_count"))) != self.num_experts:
            found.append(f"{experts} experts (expert_count), its tensors {self.num_experts}")
        return found

    @property
    def gating(self) -> int:
        """Score function of the router, as ggml's number."""
        return int(self.get("expert_gating_func", SIGMOID if self.has("exp_probs_b.bias") else SOFTMAX))


def _leaf(name: str) -> str:
    """A tensor's name within its block; empty outside blocks."""
    return "".join(name.split(".", 2)[2:]) if name.startswith("blk.") else ""


def _counts_experts(leaf: str) -> bool:
    return leaf == "ffn_gate_inp.weight" or (leaf.startswith("ffn_") and leaf.endswith("_exps.weight"))
