"""Inputs that experiments of a paper share, each made once: sizes, traces of the model or given ones, predictors."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import moetool
import predictors
from moetool import durable, plugins
from moetool.bench.paper.assumed_machine import AssumedMachine
from moetool.bench.paper.claims import Sizes
from moetool.bench.paper.verdict import CannotTestError
from moetool.capture.run import CaptureOptions, capture
from moetool.errors import UsageError
from moetool.learning.fit_options import FitOptions
from moetool.learning.predictor import Predictor, load_predictor
from moetool.learning.training import train
from moetool.models.checkpoint import Checkpoint
from moetool.prompts import gather
from moetool.trace.edit import head
from moetool.trace.reader import MANIFEST, Trace
from moetool.tuning.replay import ReplaySetup, replay

MODEL = "reference"
KEEP = ("topk", "logits", "embeddings", "hidden", "ahead")
ALL = tuple(gather.names())
"""The embedded prompt sets."""
_AT_ONCE = 8  # prompts that are captured together, where it does not matter: it takes half the time
HISTORY = 0.7
"""Share of the requests that come before those that are measured: FineMoE's 7:3."""
_MADE_BY = (
    "caching",
    "capture",
    "costing",
    "evaluation",
    "formats",
    "learning",
    "models",
    "placement",
    "prompts",
    "quantize",
    "reference",
    "runtime",
    "trace",
    "tuning",
)
"""Packages whose code makes traces, predictors and replicas: after a change of one, all of these are made anew."""
_BENCH = ("workbench.py", "experiments/replica_agreement.py")
"""Modules of this package that choose prompts and settings for them."""
_WAIT_S = 0.2


@dataclass(kw_only=True)
class Workbench:
    """Workbench that the experiments of one paper share.

    Attributes:
        sizes: how much is done, unless an experiment's options say otherwise.
        machine: the assumed one, for timelines.
        work: a folder that keeps traces, predictors and what was measured of replicas; a later run with the same code
            and the same inputs finds them there, and so does one beside it.
        given: traces to use instead of those that are captured of the embedded model, by name.
        on_note: called with the step under way.

    Effects: captures and trains into `work` on first use. What is needed only once lies in `scratch`.
    """

    sizes: Sizes
    machine: AssumedMachine
    work: Path
    given: Mapping[str, Path] = field(default_factory=dict)
    on_note: Callable[[str], None] = lambda note: None
    _made: dict[str, Any] = field(default_factory=dict)

    @property
    def seeds(self) -> range:
        """Seeds of everything that has one."""
        return range(self.sizes.seeds)

    @property
    def folds(self) -> range:
        """Parts of the prompts that are measured one by one; a trace that is given is one."""
        return range(len(self.given)) if self.given else self.seeds

    def others(self, fold: int) -> tuple[int, ...]:
        """The parts of the prompts but one, to learn from what is not measured there; none of a trace that is given."""
        return () if self.given else tuple(other for other in self.folds if other != fold)

    def trace(
        self,
        data: Sequence[str] = ALL,
        *,
        new_tokens: int = 0,
        batch: int = 1,
        fold: int | tuple[int, ...] = 0,
        resident: float = 0.0,
    ) -> Trace:
        """A trace over some prompt sets, mixed, with the columns of `KEEP`; of given ones the fold takes one in turn.

        Args:
            new_tokens: decoded for each prompt (0: as the sizes say).
            batch: requests that are forwarded together, where the trace is replayed as recorded; 1 is for replays of
                one request after the other.
            fold: another one takes other prompts of the sets; of several, the prompts of them all.
            resident: keep the column `resident` too, which reckons with this share of each layer's experts.
        """
        if self.given:
            names = list(self.given)
            mine = names[(fold if isinstance(fold, int) else fold[0]) % len(names)]
            return self.once(f"given {mine}", lambda: Trace(self.given[mine]))
        new_tokens = new_tokens or self.sizes.new_tokens
        folds = (fold,) if isinstance(fold, int) else fold
        sets = "-".join(data) if len(data) < len(ALL) else "all"
        name = f"trace-{sets}-{new_tokens}-{batch}-{'.'.join(map(str, folds))}-{resident:g}"

        def capture_into(out: Path, texts: Sequence[Any]) -> None:
            self.on_note(f"capturing {', '.join(data)}")
            order = np.random.default_rng(folds[0]).permutation(len(texts))
            options = CaptureOptions(
                max_new_tokens=new_tokens,
                batch_size=batch if batch > 1 else _AT_ONCE,
                keep=(*KEEP, "resident") if resident else KEEP,
                resident=resident or 0.5,
                threads=1,
            )
            capture(MODEL, [texts[i] for i in order], out, options)

        def make() -> Trace:
            count = self.sizes.prompts
            texts = [
                prompt
                for one in data
                for part in folds
                for prompt in list(gather.load([one]))[part * count : (part + 1) * count]
            ]
            made_of = [Checkpoint.open(MODEL).spec.revision, KEEP, [(text.prompt_id, text.text) for text in texts]]
            return Trace(self._kept(name, made_of, MANIFEST, lambda out: capture_into(out, texts)))

        return self.once(name, make)

    def apart(self, data: Sequence[str], seed: int) -> tuple[Trace, Trace | None]:
        """A trace to measure on, another for each seed, and one of all other prompts to learn from.

        Of given traces each seed takes one in turn, and there is none to learn from but that.
        """
        if self.given or self.sizes.seeds < 2:
            return self.trace(data, fold=seed), None
        return self.trace(data, fold=seed), self.trace(data, fold=self.others(seed))

    def by_server(self, data: Sequence[str], fold: int = 0) -> dict[str, Trace]:
        """A trace for each of some servers: the given ones under their names, else a part of each prompt set."""
        if self.given:
            return {name: self.once(f"given {name}", partial(Trace, path)) for name, path in self.given.items()}
        return {name: self.trace((name,), fold=fold) for name in data}

    def parts(self, traces: Mapping[str, Trace]) -> int:
        """Independent sets of traces among those of all seeds: given ones are one, however many seeds draw of them."""
        return 1 if self.given else min(len(self.seeds), len(traces))

    def trained(
        self, name: str, trace: Trace, *, seed: int = 0, options: Mapping[str, Any] | None = None, **fit: Any
    ) -> Path:
        """The folder of a predictor trained on a trace, with the epochs of the sizes unless `fit` says otherwise.

        Raises:
            MismatchError: the trace lacks what it looks at.
        """
        fit = {"max_epochs": self.sizes.epochs, **fit}
        key = json.dumps(["trained", name, str(trace.path), seed, dict(options or {}), fit], sort_keys=True)

        def train_into(out: Path) -> None:
            self.on_note(f"training {name} on {trace.path.name}")
            train(name, trace.path, out, options=options, fit=FitOptions(**fit), seed=seed)

        def make() -> Path:
            # a predictor of one's own (my_lab.predictor in a recipe) is not among `code_files`
            source = Path(plugins.load("predictor", name).__file__ or "").read_text(encoding="utf-8")
            made_of = [trace.sha256, seed, dict(options or {}), fit, source]
            return self._kept(name, made_of, "card.json", train_into)

        return Path(self.once(key, make))

    def predictor(self, name: str, trace: Trace, **how: Any) -> Predictor:
        """The predictor of `trained`."""
        folder = self.trained(name, trace, **how)
        made: Predictor = self.once(f"loaded {folder}", lambda: load_predictor(folder))
        return made

    def history(self, trace: Trace, batch: int = 1) -> tuple[Trace, frozenset[int]]:
        """The requests of a trace that come first, as a trace of its own, and those that are left to measure on.

        Args:
            batch: requests that were forwarded together are not parted.
        """
        numbers = requests_of(trace)
        cut = max(batch, round(HISTORY * len(numbers) / batch) * batch)
        if cut >= len(numbers):
            raise CannotTestError(f"{trace.path} has {len(numbers)} requests, too few to split in order")

        def make() -> Trace:
            def write(out: Path) -> None:
                head(trace, out, requests=cut)

            return Trace(self._kept("history", [trace.sha256, cut], MANIFEST, write))

        return self.once(f"history {trace.path} {cut}", make), frozenset(numbers[cut:])

    @property
    def scratch(self) -> Path:
        """A folder in `work` of this process, to be removed when the papers are through."""
        return self.work / f"scratch-{os.getpid()}"

    def folder(self, name: str) -> Path:
        """A path in `scratch` that nothing else uses."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        self._made[f"folder {name} {len(self._made)}"] = None
        return self.scratch / f"{name}-{len(self._made)}"

    def measured(self, name: str, made_of: object, make: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Numbers that `make` measures, kept in `work`.

        Args:
            made_of: their inputs beside the code, as JSON.
        """

        def write(out: Path) -> None:
            found = make()
            with durable.staged_directory(out, marker="measured.json") as folder:
                durable.write_text(folder / "measured.json", json.dumps(found))

        def read() -> dict[str, float]:
            kept = self._kept(name, made_of, "measured.json", write) / "measured.json"
            numbers: dict[str, float] = json.loads(kept.read_text(encoding="utf-8"))
            return numbers

        found: dict[str, float] = self.once(f"measured {name} {made_of!r}", read)
        return found

    def _kept(self, name: str, made_of: object, marker: str, make: Callable[[Path], None]) -> Path:
        """The folder of something that a run with this code has made, or that `make` makes now, whole or not at all."""
        content = json.dumps([moetool.__version__, _code(), made_of], sort_keys=True)
        path = self.work / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        while not (path / marker).exists():
            if durable.is_being_written(path):  # by another paper that runs beside this one
                time.sleep(_WAIT_S)
                continue
            try:
                make(path)
            except UsageError:
                if not (path / marker).exists() and not durable.is_being_written(path):
                    raise
        return path

    def replayed(
        self,
        trace: Trace,
        policy: str,
        budget: int,
        requests: frozenset[int],
        machine: AssumedMachine | None = None,
        synchronous: bool = False,
        **more: Any,
    ) -> Any:
        """A row of a replay on the assumed machine, or on another; of equal questions the first answer.

        Args:
            synchronous: of `moetool.costing.pricing.TimelineOptions`.
        """
        machine = machine or self.machine
        profile, timeline = machine.profile(trace.spec)
        timeline = replace(timeline, synchronous=synchronous)
        key = repr([str(trace.path), policy, budget, machine, timeline, sorted(requests), _identified(more)])

        def make() -> Any:
            setup = ReplaySetup(requests=requests, profile=profile, timeline=timeline, **more)
            (row,) = replay(trace, [policy], [budget], setup)
            return row

        return self.once(key, make)

    def on(self, traces: Sequence[Trace]) -> str:
        """The measured traces, in words."""
        tokens = sum(trace.num_tokens for trace in traces)
        requests = sum(len(trace.requests) for trace in traces)
        return f"{traces[0].spec.name}, {requests:,} requests of {tokens:,} tokens"

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """The result of `make`, called once for each key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def code_files() -> list[Path]:
    """Files of the code that makes kept traces, predictors and replicas, with all that it imports.

    Other experiments, verdicts and simulations are not among them: nothing that they compute is kept.
    """
    root = Path(moetool.__file__).parent
    packages = [file for package in _MADE_BY for file in (root / package).rglob("*.py")]
    bench = [root / "bench" / "paper" / name for name in _BENCH]
    return sorted([*packages, *bench, *root.glob("*.py"), *Path(predictors.__file__).parent.glob("*.py")])


@cache
def _code() -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in code_files())).hexdigest()


def _identified(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Values by name, with a predictor's content in place of the predictor: all of a class look alike."""

    def content(one: Any) -> Any:
        return (one.sha256 or id(one)) if isinstance(one, Predictor) else one

    return sorted((name, content(one)) for name, one in values.items())


def requests_of(trace: Trace) -> list[int]:
    """The requests of a trace that have tokens, in its order."""
    return [row["request"] for row in trace.requests.to_pylist() if row["tokens"]]
