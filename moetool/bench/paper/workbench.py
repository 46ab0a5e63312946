"""Shared inputs of a paper's experiments, each made once: sizes, traces, predictors."""

import ast
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
from moetool.base import durable, plugins
from moetool.base.errors import UsageError
from moetool.bench.paper.assumed_machine import AssumedMachine
from moetool.bench.paper.claims import Sizes
from moetool.bench.paper.verdict import CannotTestError
from moetool.capture.run import CaptureOptions, capture
from moetool.models.checkpoint import Checkpoint
from moetool.prompts import gather
from moetool.trace.edit import head
from moetool.trace.reader import MANIFEST, Trace
from moetool.training.fit_options import FitOptions
from moetool.training.predictor import Predictor, load_predictor
from moetool.training.training import train
from moetool.tuning.replay import ReplaySetup, replay

MODEL = "reference"
KEEP = ("topk", "logits", "embeddings", "hidden", "ahead")
ALL = tuple(gather.names())
"""The embedded prompt sets."""
_AT_ONCE = 8  # prompts captured per batch where batches do not matter; takes half the time
HISTORY = 0.7
"""Share of the requests that precede the measured ones: FineMoE's 7:3."""
_MADE_BY = (
    *("base", "caching", "capture", "costing", "kernels", "measuring", "models", "placement", "prediction", "prompts"),
    *("runtime", "trace", "training", "tuning"),
)
"""Packages whose code makes traces, predictors and replicas; a change of one makes all of these again."""
_BENCH = ("workbench.py", "experiments/replica_agreement.py")
"""Modules of this package that choose their prompts and settings."""
_WAIT_S = 0.2


@dataclass(kw_only=True)
class Workbench:
    """Shared inputs of the experiments of one paper.

    Attributes:
        sizes: default sizes of experiments.
        machine: assumed machine, for timelines.
        work: folder that keeps traces, predictors and measurements of replicas, for concurrent and later runs with the
            same code and inputs.
        given: traces by name, instead of captures of the embedded model.

    Effects: captures and trains into `work` on first use; temporary files are in `scratch`.
    """

    sizes: Sizes
    machine: AssumedMachine
    work: Path
    given: Mapping[str, Path] = field(default_factory=dict)
    _made: dict[str, Any] = field(default_factory=dict)

    @property
    def seeds(self) -> range:
        return range(self.sizes.seeds)

    @property
    def folds(self) -> range:
        """Numbers of the parts of the prompts, one per seed; each given trace is a part."""
        return range(len(self.given)) if self.given else self.seeds

    def trace(
        self,
        data: Sequence[str] = ALL,
        *,
        new_tokens: int = 0,
        batch: int = 1,
        fold: int | tuple[int, ...] = 0,
        resident: float = 0.0,
    ) -> Trace:
        """Return a trace of mixed prompt sets, with the columns of `KEEP`; with given traces, the fold's.

        Args:
            new_tokens: decoded tokens per prompt (0: the sizes').
            batch: requests per batch, for replays as recorded; 1: for replays of one request after the other.
            fold: part of the prompts, or several parts together.
            resident: share of each layer's experts that the column `resident` assumes in memory (0: no such column).
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
            order = np.random.default_rng(folds[0]).permutation(len(texts))
            options = CaptureOptions(
                max_new_tokens=new_tokens,
                batch_size=batch if batch > 1 else _AT_ONCE,
                keep=(*KEEP, "resident") if resident else KEEP,
                resident=resident or 0.5,
                threads=1,
                dtype="float32",
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

    def others(self, data: Sequence[str], fold: int) -> Trace | None:
        """Return a trace of all parts of the prompts except the measured one, for training.

        None with given traces, or if there is one part.
        """
        others = tuple(other for other in self.folds if other != fold)
        return self.trace(data, fold=others) if others and not self.given else None

    def by_server(self, data: Sequence[str], fold: int = 0) -> dict[str, Trace]:
        """Return a trace per server: the given ones by name, else a part of each prompt set."""
        if self.given:
            return {name: self.once(f"given {name}", partial(Trace, path)) for name, path in self.given.items()}
        return {name: self.trace((name,), fold=fold) for name in data}

    def parts(self, traces: Mapping[str, Trace]) -> int:
        """Return the number of independent sets of traces over all seeds; given traces are one set."""
        return 1 if self.given else min(len(self.seeds), len(traces))

    def trained(
        self, name: str, trace: Trace, *, seed: int = 0, options: Mapping[str, Any] | None = None, **fit: Any
    ) -> Path:
        """Return the folder of a predictor trained on a trace, by default for the sizes' epochs.

        Raises:
            MismatchError: the trace lacks a column that the predictor needs.
        """
        fit = {"max_epochs": self.sizes.epochs, **fit}
        key = json.dumps(["trained", name, str(trace.path), seed, dict(options or {}), fit], sort_keys=True)

        def train_into(out: Path) -> None:
            train(name, trace.path, out, options=options, fit=FitOptions(**fit), seed=seed)

        def make() -> Path:
            # `code_files` lacks predictors from outside, such as my_lab.predictor in a recipe
            source = parsed(Path(plugins.load("predictor", name).__file__ or ""))
            made_of = [trace.sha256, seed, dict(options or {}), fit, source]
            return self._kept(name, made_of, "card.json", train_into)

        return Path(self.once(key, make))

    def predictor(self, name: str, trace: Trace, **how: Any) -> Predictor:
        """Return a predictor; arguments as in `trained`."""
        folder = self.trained(name, trace, **how)
        return self.once(f"loaded {folder}", lambda: load_predictor(folder))

    def history(self, trace: Trace, batch: int = 1) -> tuple[Trace, frozenset[int]]:
        """Return the first requests of a trace as a trace, and the numbers of the rest, which are measured.

        Args:
            batch: requests per batch; batches stay whole.
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
        """Folder in `work` for temporary files of this process; the caller removes it."""
        return self.work / f"scratch-{os.getpid()}"

    def folder(self, name: str) -> Path:
        """Return an unused path in `scratch`."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        self._made[f"folder {name} {len(self._made)}"] = None
        return self.scratch / f"{name}-{len(self._made)}"

    def measured(self, name: str, made_of: object, make: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return numbers that `make` measures, kept in `work`.

        Args:
            made_of: inputs other than the code, as JSON.
        """

        def write(out: Path) -> None:
            found = make()
            with durable.staged_directory(out, marker="measured.json") as folder:
                durable.write_text(folder / "measured.json", json.dumps(found))

        def read() -> dict[str, float]:
            kept = self._kept(name, made_of, "measured.json", write) / "measured.json"
            return json.loads(kept.read_text(encoding="utf-8"))

        found: dict[str, float] = self.once(f"measured {name} {made_of!r}", read)
        return found

    def _kept(self, name: str, made_of: object, marker: str, make: Callable[[Path], None]) -> Path:
        """Return the folder that a run with the same code and inputs made, or make it now, whole or not at all."""
        content = json.dumps([moetool.__version__, _code(), made_of], sort_keys=True)
        path = self.work / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        while not (path / marker).exists():
            if durable.is_being_written(path):  # by a concurrent run
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
        """Return the row of a replay on an assumed machine (default: the workbench's); equal replays run once.

        Args:
            synchronous: as in `moetool.costing.pricing.TimelineOptions`.
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
        """Describe the measured traces."""
        tokens = sum(trace.num_tokens for trace in traces)
        requests = sum(len(trace.requests) for trace in traces)
        return f"{traces[0].spec.name}, {requests:,} requests of {tokens:,} tokens"

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """The result of `make`, called once for each key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def code_files() -> list[Path]:
    """Return the files whose code makes kept traces, predictors and replicas, imports included."""
    root = Path(moetool.__file__).parent
    packages = [file for package in _MADE_BY for file in (root / package).rglob("*.py")]
    bench = [root / "bench" / "paper" / name for name in _BENCH]
    return sorted([*packages, *bench, *root.glob("*.py"), *Path(predictors.__file__).parent.glob("*.py")])


@cache
def _code() -> str:
    return hashlib.sha256("".join(map(parsed, code_files())).encode()).hexdigest()


def parsed(file: Path) -> str:
    """Return the syntax tree of a file without docstrings, as text: comments, wording and layout change no result."""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _identified(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return sorted values, with predictors replaced by digests, since those of a class have the same repr."""

    def content(one: Any) -> Any:
        return (one.sha256 or id(one)) if isinstance(one, Predictor) else one

    return sorted((name, content(one)) for name, one in values.items())


def requests_of(trace: Trace) -> list[int]:
    """Return the numbers of a trace's requests with tokens, in its order."""
    return [row["request"] for row in trace.requests.to_pylist() if row["tokens"]]
