"""Machines and models by name: vendors' figures and published configs, and the costs derived from both."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moetool.base import config
from moetool.base.config import POSITIVE, SHARE, require_within
from moetool.base.errors import UsageError
from moetool.bench.paper.assumed_machine import AssumedMachine
from moetool.costing.machines import NamedMachine, NamedModel, read_named_machine, read_named_model
from moetool.simulation.simulated_costs import AssumedCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineChoice:
    """A machine and a model by name, or costs in seconds; a given cost replaces the derived one.

    Attributes:
        machine, model: names in `recipes/machines` and `recipes/models`, both or neither.
        link_share, memory_share, compute_share: reached shares of the vendors' rates, by copies, one-token products
            and products of many tokens. The default of the link is 25 of 31.5 GB/s, PCIe 4.0 from pinned memory.
        links: factor on the rates of all links: of loads, GPUs and servers.

    The other attributes are those of `AssumedMachine`.

    Raises:
        UsageError: a name is unknown, or one of the two is missing.
    """

    machine: str = ""
    model: str = ""
    link_share: float = 0.8
    memory_share: float = 1.0
    compute_share: float = 0.5
    links: float = 1.0
    expert_s: float | None = None
    expert_token_s: float | None = None
    dense_s: float | None = None
    dense_token_s: float | None = None
    shared_s: float | None = None
    shared_token_s: float | None = None
    load_s: float | None = None
    host_s: float | None = None
    host_token_s: float | None = None
    prediction_s: float | None = None

    def __post_init__(self) -> None:
        if bool(self.machine) != bool(self.model):
            raise UsageError(
                f"machine {self.machine!r} with model {self.model!r}: costs follow from the two; name both"
            )
        require_within(self, "machine: ", link_share=SHARE, memory_share=SHARE, compute_share=SHARE)
        require_within(self, "machine: ", links=POSITIVE)

    def assumed(self) -> AssumedMachine:
        """Return the costs: derived if machine and model are named, else `AssumedMachine`'s own.

        A load or move takes an expert's bytes over the link. An expert takes one read of its weights for its first
        token, and the arithmetic of each further token; so do the dense part of a layer and its shared experts.
        Launches are not included.
        """
        values: dict[str, float] = {}
        if self.machine:
            machine, model = self.read()
            read_s = 1 / (machine.memory_bytes_s * self.memory_share)
            token_s = 2 / (machine.half_flops * self.compute_share)
            shared = model.shared_parameters / model.dense_parameters
            values = {
                "load_s": model.expert_bytes / (machine.host_bytes_s * self.link_share),
                "expert_s": model.expert_bytes * read_s,
                "expert_token_s": model.expert_parameters * token_s,
                "dense_s": (1 - shared) * model.dense_bytes * read_s,
                "dense_token_s": (1 - shared) * model.dense_parameters * token_s,
                "shared_s": shared * model.dense_bytes * read_s,
                "shared_token_s": shared * model.dense_parameters * token_s,
            }
        given = {name: getattr(self, name) for name in AssumedMachine.__dataclass_fields__}
        costs = AssumedMachine(**{**values, **{name: value for name, value in given.items() if value is not None}})
        return replace(costs, load_s=costs.load_s / self.links)

    def read(self) -> tuple[NamedMachine, NamedModel]:
        """Return machine and model. Raises: UsageError: a name is unknown, or the machine has no GPU."""
        machine = read_named_machine(self.machine)
        if not machine.gpus:
            raise UsageError(f"machine {self.machine!r} has no GPU; name one that has")
        return machine, read_named_model(self.model)

    def gpu_link_bytes_s(self) -> float:
        """Bytes per second between GPUs of a node. Raises: UsageError: they have no link."""
        machine = read_named_machine(self.machine)
        if not machine.gpu_link_bytes_s:
            raise UsageError(f"GPUs of machine {self.machine!r} have no link; name a machine with several")
        return machine.gpu_link_bytes_s * self.link_share


def changed(machine: AssumedMachine, by: Mapping[str, Any]) -> AssumedMachine:
    """Return a machine with some costs changed, or the one that `by` names, with the same factor on its links.

    Raises:
        UsageError: an unknown name, or a cost that no machine has.
    """
    if "machine" in by:
        return config.parse(MachineChoice, {"links": machine.links, **by}, "machine").assumed()
    costs = {name: getattr(machine, name) for name in AssumedMachine.__dataclass_fields__}
    return config.parse(AssumedMachine, {**costs, **by}, "machine")


def simulated_costs(machine: AssumedMachine, batch: int = 1) -> AssumedCosts:
    """Return the simulator's costs where each token stands for a batch of tokens, which reads weights once."""
    dense_token_s = machine.dense_token_s + machine.shared_token_s
    return AssumedCosts(
        dense_s=machine.dense_s + machine.shared_s + (batch - 1) * dense_token_s,
        dense_token_s=batch * dense_token_s,
        expert_s=machine.expert_s + (batch - 1) * machine.expert_token_s,
        expert_token_s=batch * machine.expert_token_s,
    )
