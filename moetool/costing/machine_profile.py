"""Cost profile of a model on a machine by vendors' figures, for replays on machines that nobody has at hand.

Seconds are those of `moetool.costing.estimates`: bytes by reached rates, and fixed times of layers. A context's own
reads are left out, and so are those of embedding and output head.
"""

from moetool.base.errors import MismatchError, UsageError
from moetool.base.machine import Machine
from moetool.base.types import ModelSpec
from moetool.costing.costs import ComputeCosts, CostProfile, Curve, LoadCosts
from moetool.costing.estimates import GPU_MISS_LAYER_S, Rates, host_rates, rates_of, together_share
from moetool.costing.machines import NamedMachine, NamedModel, read_named_model, recipe_names

_ROWS = (1, 8, 64, 512, 4096)  # knots of curves by tokens
_ATTENTION = 4
"""Parameters of a layer without its experts, in squares of the hidden size, where no recipe has the model (assumed)."""


def machine_profile(machine: NamedMachine, spec: ModelSpec) -> CostProfile:
    """Return the costs of a model on a machine with a GPU, for `CostProfile.on` its devices `cuda` and `cpu`.

    Raises:
        UsageError: the machine has no GPU, or no host memory that it loads from.
        MismatchError: the model's sizes are unknown.
    """
    if not machine.gpus or not machine.host_memory_bytes_s or not machine.host_flops:
        raise UsageError(
            f"machine {machine.name} has no GPU, or no figures of its host, expected both; name another, such as "
            f"pc-rtx-4090-ddr5"
        )
    gpu, host = rates_of(machine), host_rates(machine)
    if not gpu.link_bytes_s:
        raise UsageError(
            f"machine {machine.name} has a disk, but host_memory_bytes is 0, which stands for a GPU that shares host "
            f"memory; give the bytes of its host memory"
        )
    if not spec.sized:
        raise MismatchError(
            f"the bytes of an expert of {spec.name} are unknown, and with them every cost; import the trace again with "
            f"--set expert_bytes=NUMBER"
        )
    model = _recipe(spec)
    elements = spec.slot_bytes / 2 if model is None else model.expert_parameters
    dense = _ATTENTION * spec.hidden_size**2 if model is None else model.dense_parameters
    dense_bytes = 2.0 * dense if model is None else model.dense_bytes
    share = together_share(gpu.link_bytes_s, host, 8 * spec.slot_bytes / elements)
    return CostProfile(
        spec=spec,
        config_only=True,
        num_hidden_layers=spec.num_layers,
        machine=_facts(machine),
        load_average=0.0,
        measured_s=0.0,
        compute=tuple(_compute(rates, (spec.slot_bytes, elements), (dense_bytes, dense)) for rates in (gpu, host)),
        loads=(_loads("pinned", gpu.link_bytes_s), _loads("disk", gpu.disk_bytes_s)),
        link_share=share,
        host_share=share,
        miss_s=GPU_MISS_LAYER_S,
    )


def assumption(spec: ModelSpec) -> str:
    """Return what the costs assume about a model; empty if a recipe has it."""
    if _recipe(spec) is not None:
        return ""
    return (
        f"no recipe has {spec.name}, so the parameters of its experts are assumed to take 2 bytes each; if they are "
        f"quantized, T_comp is too small: import with --set name=NAME of one of {', '.join(recipe_names('models'))}"
    )


def _compute(rates: Rates, expert: tuple[float, float], dense: tuple[float, float]) -> ComputeCosts:
    """Costs of a device. Args: expert, dense: bytes and parameters of an expert, and of a layer without its experts."""
    fixed, nothing = rates.layer_s, Curve(x=(1,), y=(0.0,))
    return ComputeCosts(
        device=rates.device,
        dtype="bfloat16",
        threads=0,
        expert=_products(rates, *expert, 0.0),
        attention=Curve(x=(1,), y=(_products(rates, *dense, fixed)(1),)),
        prompt_attention=_products(rates, *dense, fixed),
        gate=nothing,
        shared=nothing,
        dense=None,
        head=nothing,
    )


def _products(rates: Rates, num_bytes: float, parameters: float, fixed_s: float) -> Curve:
    """Seconds by tokens: those of reading the weights, or of the arithmetic where that takes longer."""
    read_s = rates.read_s(num_bytes, 8 * num_bytes / parameters) if parameters else 0.0
    return Curve(x=_ROWS, y=tuple(fixed_s + max(read_s, 2 * rows * parameters / rates.flops) for rows in _ROWS))


def _loads(tier: str, bytes_s: float) -> LoadCosts:
    return LoadCosts(tier=tier, threads=1, direct=True, seconds=Curve(x=(0, 1e9), y=(0.0, 1e9 / bytes_s)))


def _recipe(spec: ModelSpec) -> NamedModel | None:
    """Return the recipe of a model by its name and experts; None without one. A trace may lack some of its layers."""
    short = spec.name.rsplit("/", 1)[-1].lower()
    names = [name for name in recipe_names("models") if short.startswith(name)]
    if not names:
        return None
    model = read_named_model(max(names, key=len))
    return model if model.experts == spec.num_experts and spec.num_layers <= model.layers else None


def _facts(machine: NamedMachine) -> Machine:
    return Machine(
        cpu="",
        cores=0,
        memory_bytes=int(machine.host_memory_bytes),
        amx=False,
        avx512_bf16=False,
        gpu=machine.name,
        gpu_memory_bytes=int(machine.memory_bytes),
        system="",
        torch="",
        transformers="",
    )
