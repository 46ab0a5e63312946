"""Contracts, types and errors for a policy, predictor or planner of your own.

`moetool guide plugins` has an example of each. Importing this module imports none of them; using a name does, so a
policy or planner needs no torch.
"""

TYPE_CHECKING = False

_PUBLIC = {
    "CapacityError": "base.errors",
    "Demand": "placement.demand",
    "ForwardInfo": "base.types",
    "GateEvent": "base.types",
    "MismatchError": "base.errors",
    "ModelSpec": "base.types",
    "MoetoolError": "base.errors",
    "Phase": "base.types",
    "Policy": "caching.policy",
    "Predictor": "training.predictor",
    "Problem": "placement.planner",
    "Tokens": "training.tokens",
    "UsageError": "base.errors",
}
"""Names and the modules that define them."""

if TYPE_CHECKING:
    from typing import Any

    from moetool.base.errors import CapacityError as CapacityError
    from moetool.base.errors import MismatchError as MismatchError
    from moetool.base.errors import MoetoolError as MoetoolError
    from moetool.base.errors import UsageError as UsageError
    from moetool.base.types import ForwardInfo as ForwardInfo
    from moetool.base.types import GateEvent as GateEvent
    from moetool.base.types import ModelSpec as ModelSpec
    from moetool.base.types import Phase as Phase
    from moetool.caching.policy import Policy as Policy
    from moetool.placement.demand import Demand as Demand
    from moetool.placement.planner import Problem as Problem
    from moetool.training.predictor import Predictor as Predictor
    from moetool.training.tokens import Tokens as Tokens

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> "Any":
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"moetool.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
