"""Changes of a pool's cache policy between forwards, for `serve` and for the replay of its gate log."""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.base.errors import MoetoolError, first_line
from moetool.base.types import ModelSpec
from moetool.caching.layer_slots import SHARES, equal_slots
from moetool.caching.policy import Policy, build_policy
from moetool.caching.residency import Residency

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A cache policy with its default options, and the form of its pool.

    Attributes:
        policy: name of the policy.
        pool: `one` for all layers, `layer` or `mixed` (`moetool.caching.layer_slots.POOL_FORMS`).
    """

    policy: str
    pool: str = "one"

    @property
    def name(self) -> str:
        """Return the name for tables."""
        return self.policy + {"one": "", "layer": " by layer"}.get(self.pool, f", {self.pool}")

    def layer_slots(self, spec: ModelSpec, num_slots: int) -> tuple[int, ...]:
        """Return the slots guaranteed to each layer; empty for one pool. Errors as `equal_slots`."""
        return equal_slots(spec, num_slots, SHARES[self.pool]) if self.pool in SHARES else ()


class PolicyChanges:
    """Switches the policy of a pool and keeps the learned state of each.

    `state` and `restore` are those of the first policy, whichever is active.

    Args:
        first: the active policy.
        options: options of the first policy; others have their defaults.

    Attributes:
        current: the active policy.
    """

    def __init__(self, residency: Residency, first: PolicyChoice, options: Mapping[str, Any]) -> None:
        self.spec = residency.policy.spec
        self.current = first
        self._first, self._options = first.policy, dict(options)
        self._residency = residency
        self._states: dict[str, dict[str, np.ndarray]] = {}

    def change(self, choice: PolicyChoice) -> None:
        """Switch to a policy, between two forwards.

        Raises:
            CapacityError: the policy needs more slots.
        """
        made, layer_slots = self._build(choice)
        learned = self._now()
        self._residency.change(made, layer_slots)
        self._states[self.current.policy] = learned
        self._states.pop(choice.policy, None)  # the policy itself now holds it
        self.current = choice

    def options_of(self, policy: str) -> Mapping[str, Any]:
        """Return the options that a policy is built with."""
        return self._options if policy == self._first else {}

    def learned(self, policy: str) -> dict[str, np.ndarray]:
        """Return the state of a policy when it was last active; empty if it never was or is now."""
        return self._states.get(policy, {})

    def state(self) -> dict[str, np.ndarray]:
        """Return the first policy's state."""
        return self._now() if self.current.policy == self._first else self._states[self._first]

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the first policy's state; only before any change."""
        self._residency.policy.restore(state)

    def states(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the state of every policy that has been active, by name."""
        return {**self._states, self.current.policy: self._now()}

    def restore_states(self, states: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Restore the state of each policy; only before any change. A policy drops a state that does not fit it."""
        num_slots = self._residency.policy.num_slots
        for name, state in states.items():
            if not state:
                continue
            try:
                build_policy(name, self.spec, self.options_of(name), num_slots).restore(state)
            except (ValueError, KeyError, MoetoolError) as error:
                _LOG.warning("policy %s starts without its kept state, which does not fit: %s", name, first_line(error))
                continue
            if name == self.current.policy:
                self._residency.policy.restore(state)
            else:
                self._states[name] = {array_name: array.copy() for array_name, array in state.items()}

    def _now(self) -> dict[str, np.ndarray]:
        """Return a copy of the active policy's state, which keeps changing."""
        return {name: array.copy() for name, array in self._residency.policy.state().items()}

    def _build(self, choice: PolicyChoice) -> tuple[Policy, tuple[int, ...]]:
        num_slots = self._residency.policy.num_slots
        made = build_policy(choice.policy, self.spec, self.options_of(choice.policy), num_slots)
        if state := self._now() if choice.policy == self.current.policy else self._states.get(choice.policy):
            made.restore(state)
        return made, choice.layer_slots(self.spec, num_slots)


class CombinedPolicyState:
    """States of all policies that may become active, as one.

    Args:
        known: names of policies; states of others are ignored.
    """

    def __init__(self, changes: PolicyChanges, known: Collection[str]) -> None:
        self.spec = changes.spec
        self._changes, self._known = changes, frozenset(known)

    def state(self) -> dict[str, np.ndarray]:
        """Return the states; each array's name begins with its policy's name and a slash."""
        return {
            f"{policy}/{name}": array
            for policy, state in self._changes.states().items()
            if policy in self._known
            for name, array in state.items()
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the states."""
        states: defaultdict[str, dict[str, np.ndarray]] = defaultdict(dict)
        for name, array in state.items():
            policy, _, array_name = name.rpartition("/")
            if policy in self._known:
                states[policy][array_name] = array
        self._changes.restore_states(states)
