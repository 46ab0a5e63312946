"""Verdicts on claims: values over seeds, derived values, and a check."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from moetool.base.errors import MoetoolError, UsageError, unknown_name
from moetool.base.tables import significant
from moetool.bench.experiment_figure import ExperimentResult
from moetool.simulation.simulation_results import interval

Answer = Literal["agrees", "differs", "undecided", "cannot be tested here"]
ANSWERS: tuple[Answer, ...] = ("agrees", "differs", "undecided", "cannot be tested here")
_KINDS = ("less", "times", "minus", "lowest")
_RATIOS = ("less", "times")
_DIFFERENCES = ("less", "minus")
_LEAST_EFFECT = 0.01
"""Smallest relevant difference of two ordered values, as a share of the larger."""
_LEAST_TRACES = 3
SPREAD = "within the spread over seeds"
"""Begins the reason of an undecided verdict that more seeds can decide."""
FACTOR = 1.5
"""A value matches a printed one if neither is more than this many times the other."""


class CannotTestError(MoetoolError):
    """A requirement of an experiment is missing; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The relation of a claim; every given part must hold.

    Attributes:
        order: names, each with a lower value than the next.
        lowest, highest: a name below, or above, all others of `among` (default: all measured ones).
        at_least, at_most: bounds by name. Values less than 1 % from a bound leave it undecided, but whole numbers may
            equal it; a bound of 0 on a derived difference asks for the least effect.
        above: values by name without which the claim could not fail: unless they are above these, it cannot be tested.

    Raises:
        UsageError: no part is given.
    """

    order: tuple[str, ...] = ()
    lowest: str = ""
    highest: str = ""
    among: tuple[str, ...] = ()
    at_least: Mapping[str, float] = field(default_factory=dict)
    at_most: Mapping[str, float] = field(default_factory=dict)
    above: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.order) == 1 or not (self.order or self.lowest or self.highest or self.at_least or self.at_most):
            raise UsageError("an empty check; give order, lowest, highest, at_least or at_most")

    @property
    def names(self) -> list[str]:
        named = [*self.order, self.lowest, self.highest, *self.among, *self.at_least, *self.at_most, *self.above]
        return list(dict.fromkeys(name for name in named if name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A claim's verdict.

    Attributes:
        answer: verdict on the direction: `agrees` if every relation holds beyond the spread over seeds, `differs` if
            one is reversed beyond it, `undecided` if the spread leaves one open, two values are less than 1 % apart, or
            there is only one run.
        why: the deciding relation, or the missing requirement.
        size: comparison with the printed values (within a factor of 1.5 or not); empty if the paper prints none, or the
            claim cannot be tested here.
        shown: name, mean and half of the 95 % confidence interval (None with one run) of the claim's values.
        unit: units by name; derived values may have another.
    """

    answer: Answer
    why: str
    size: str = ""
    shown: tuple[tuple[str, float, float | None], ...] = ()
    unit: Mapping[str, str] = field(default_factory=dict)


def derive(values: Mapping[str, Sequence[float]], wanted: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, list]:
    """Return values and those derived per seed: `less = [a, b]` is 1 - b/a, `times` a/b, `minus` a - b, `lowest` min.

    A ratio to 0 is NaN.

    Raises:
        UsageError: the kind is unknown, the number of names is wrong, or one was not measured.
    """
    made: dict[str, list] = {name: list(given) for name, given in values.items()}
    for name, how in wanted.items():
        ((kind, pair),) = how.items() if len(how) == 1 else [("", ())]
        if kind not in _KINDS:
            raise unknown_name(f"derivation of {name!r}", kind, _KINDS)
        if len(pair) < 2 or (len(pair) > 2 and kind != "lowest"):
            raise UsageError(f"{name!r} is derived from {len(pair)} values, expected two")
        if kind == "lowest":
            made[name] = [min(each) for each in zip(*(require(made, one) for one in pair), strict=True)]
            continue
        first, second = (require(made, one) for one in pair)
        for a, b in zip(first, second, strict=True):
            below = a if kind == "less" else b
            if kind == "minus":
                value = a - b
            elif below == 0:
                value = math.nan
            else:
                value = 1 - b / a if kind == "less" else a / b
            made.setdefault(name, []).append(value)
    return made


def require(values: Mapping[str, Sequence[float]], name: str) -> Sequence[float]:
    """The values of a name. Raises: UsageError: it was not measured."""
    if name not in values:
        raise unknown_name("measured value", name, values)
    return values[name]


def judge(
    check: Check,
    found: ExperimentResult,
    wanted: Mapping[str, Mapping[str, Sequence[str]]],
    *,
    size: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ruled_out: str = "",
) -> Verdict:
    """Compare a claim with the measured values.

    A claim whose bound no exact policy reaches on that machine and trace (`ceilings`), or that could not fail
    (`Check.above`), cannot be tested here.

    Args:
        size: printed values by name, one or several.
        ruled_out: why the values say nothing about the paper's, if so: the claim cannot be tested here.

    Raises:
        UsageError: the claim refers to an unmeasured value.
    """
    values = derive(found.values, wanted)
    relations: list[tuple[str, list[float], float]] = []  # description, margin and required margin, per seed

    def below(low: str, high: str) -> None:
        lows, highs = require(values, low), require(values, high)
        gaps = [b - a for a, b in zip(lows, highs, strict=True)]
        least = (1e-9 if found.exact else _LEAST_EFFECT) * max(map(abs, (*lows, *highs)))
        relations.append((f"{low} < {high}", gaps, least))

    for low, high in pairwise(check.order):
        below(low, high)
    for extreme, lowest in ((check.lowest, True), (check.highest, False)):
        for other in (check.among or tuple(found.values)) if extreme else ():
            if other != extreme:
                below(*((extreme, other) if lowest else (other, extreme)))
    for bounds, sign in ((check.at_least, 1), (check.at_most, -1)):
        for name, bound in bounds.items():
            relation = f"{name} {'≥' if sign > 0 else '≤'} {bound:g}"
            gaps, least = [sign * (value - bound) for value in require(values, name)], 0.0
            if not (found.exact or (bound and all(value.is_integer() for value in values[name]))):
                least = _LEAST_EFFECT * abs(bound) or _least_difference(values, wanted.get(name, {}))
            relations.append((relation, gaps, least))
    units = {name: _unit(wanted[name], found.unit) if name in wanted else found.unit for name in values}
    names = [*check.names, *wanted]
    if (check.lowest or check.highest) and not check.among:
        names += found.values
    shown = tuple((name, *interval(values[name])) for name in dict.fromkeys(names))
    beyond = [
        f"{name} is at most {most:.3g} on this machine and routing, below the claimed {check.at_least[name]:g}"
        for name, most in ceilings(check, found, wanted).items()
        if check.at_least[name] > most
    ]
    beyond += [
        f"{name} is not above {bound:g} here, so the claim could not fail"
        for name, bound in check.above.items()
        if not _holds([value - bound for value in require(values, name)], 0.0, found.exact)
    ]
    failed = [words for words, gaps, least in relations if _holds(gaps, least, found.exact) is False]
    open_ = [words for words, gaps, least in relations if _holds(gaps, least, found.exact) is None]
    if ruled_out or beyond:
        answer: Answer = "cannot be tested here"
        why = ruled_out or "; ".join(beyond)
    elif 0 < found.traces < _LEAST_TRACES and not found.exact:
        answer, why = "undecided", f"{found.traces} of {_LEAST_TRACES} independent traces"
    elif failed:
        answer, why = "differs", "not " + ", nor ".join(failed)
    elif open_:
        near = [words for words, gaps, least in relations if words in open_ and _is_near(gaps, least, found.exact)]
        single = len(next(iter(found.values.values()))) == 1
        kinds = {
            "one run" if single else SPREAD: [words for words in open_ if words not in near],
            "by less than 1 %": near,
        }
        answer, why = "undecided", "; ".join(f"{kind}: {', '.join(these)}" for kind, these in kinds.items() if these)
    else:
        answer, why = "agrees", ", ".join(words for words, _, _ in relations)
    sizes = "" if answer == "cannot be tested here" else _sizes(values, size, wanted)
    return Verdict(answer=answer, why=why, size=sizes, shown=shown, unit=units)


def ceilings(
    check: Check, found: ExperimentResult, wanted: Mapping[str, Mapping[str, Sequence[str]]]
) -> dict[str, float]:
    """Return the largest ratios that the machine and the traces allow, of those with a lower bound in the check.

    The compared policy takes the best value of any policy in its place (`ExperimentResult.best`).
    """
    values, most = derive(found.values, wanted), {}
    for name in check.at_least:
        how = wanted.get(name, {})
        for kind, pair in how.items():
            better = pair[0] if found.highest_best else pair[1]
            if kind in _RATIOS and better in found.best:
                most[name] = max(derive({**values, better: found.best[better], name: []}, {name: how})[name])
    return most


def _least_difference(values: Mapping[str, Sequence[float]], how: Mapping[str, Sequence[str]]) -> float:
    """The least effect in the unit of a derived difference; 0 for other values."""
    kind = next(iter(how), "")
    if kind not in _DIFFERENCES:
        return 0.0
    return _LEAST_EFFECT * (1.0 if kind == "less" else max(abs(v) for one in how[kind] for v in require(values, one)))


def _holds(gaps: Sequence[float], least: float, exact: bool) -> bool | None:
    """Return whether a relation holds over the seeds by `least` or more; None if undecided."""
    if (len(gaps) < 2 and not exact) or not all(map(math.isfinite, gaps)):
        return None
    mean, half = interval(gaps)
    half = half or 0.0
    if mean - half > 0 or (least == 0 and mean - half >= 0):
        return True if mean >= least else None
    return False if mean + half < 0 and -mean >= least else None


def _is_near(gaps: Sequence[float], least: float, exact: bool) -> bool:
    """Return whether a relation's whole interval is within `least`, so that no more seeds would decide it."""
    mean, half = interval(gaps)
    return (exact or half is not None) and abs(mean) + (half or 0.0) < least


def _sizes(
    values: Mapping[str, Sequence[float]],
    printed: Mapping[str, Sequence[float]],
    wanted: Mapping[str, Mapping[str, Sequence[str]]],
) -> str:
    """Compare mean values with the printed ones, in words.

    Of a multiple, the part above 1 counts. A derived gain is none if its interval contains 0.
    """
    words = []
    for name, theirs in printed.items():
        one = 1.0 if "times" in wanted.get(name, {}) else 0.0
        mean, half = interval(require(values, name))
        mean -= one
        low, high = min(theirs) - one, max(theirs) - one
        if low / FACTOR <= mean <= high * FACTOR:
            words.append(f"{name} as printed")
        elif mean <= (half or 0.0 if name in wanted else 0.0) or not math.isfinite(mean):
            words.append(f"{name} none, printed {low + one:g}")
        elif mean < low:
            words.append(f"{name} smaller, by {significant(low / mean, 2)}x")
        else:
            words.append(f"{name} larger, by {significant(mean / high, 2)}x")
    return ", ".join(words)


def _unit(how: Mapping[str, Sequence[str]], unit: str) -> str:
    return {"less": "%", "times": "x"}.get(next(iter(how)), unit)
