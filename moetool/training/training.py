"""Training of predictors on traces: hold out requests, count, fit, and write the card.

Requests, not tokens, are held out, since the tokens of one request resemble each other too much to count as unseen.
Validation requests decide when to stop. Test requests are not used here; `moetool.training.evaluate` scores on them.
In a trace of one or two requests, such as a single conversation, each request is split in time: its last tokens are
held out.
"""

import contextlib
import platform
import re
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from moetool.base import durable, plugins
from moetool.base.errors import CapacityError, MoetoolError, UsageError, first_line
from moetool.prediction.unseen_requests import Part
from moetool.trace.reader import Trace
from moetool.trace.same_prompts import prompt_digests
from moetool.training.fit_options import HELD_OUT, FitOptions
from moetool.training.predictor import build, save
from moetool.training.tokens import num_tokens, read

_FEWEST = 3  # traces with fewer requests are split in time
FIT = FitOptions()
_STOPPED = {"validation": "validation stopped improving", "max_epochs": "the maximum number of epochs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Tokens for training, validation and test.

    Attributes:
        train, validation, test: ids of requests. After a split in time, `train` has all of them, so that no request
            counts as unseen.
        in_time: for a split in time, the ranges of each request's tokens in the three parts, in the order of its
            forwards.
    """

    train: tuple[int, ...]
    validation: tuple[int, ...] = ()
    test: tuple[int, ...] = ()
    in_time: Mapping[str, Mapping[int, range]] | None = None

    def part(self, name: str) -> Part:
        """Return `train`, `validation` or `test` in the form of `moetool.training.tokens`."""
        whole: tuple[int, ...] = getattr(self, name)
        return whole if self.in_time is None else self.in_time[name]


def split_requests(trace: Trace, seed: int, share: float = HELD_OUT) -> Split:
    """Split the requests of a trace by task: a share for validation, again for test, the rest for training.

    Raises:
        UsageError: fewer than three requests have tokens.
    """
    rows = [row for row in trace.requests.to_pylist() if row["tokens"]]
    if len(rows) < _FEWEST:
        raise UsageError(
            f"{trace.path} holds {len(rows)} requests with {trace.num_tokens} tokens; at least {_FEWEST} requests are "
            f"needed, to train, validate and test on different ones; capture more prompts"
        )
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = sorted((rows[i] for i in order), key=lambda row: (row["dataset"], row["task"]))  # stable
    ids = np.array([row["request"] for row in shuffled])
    held_out = max(1, round(share * len(ids)))
    test = _evenly(len(ids), held_out)
    rest = np.delete(ids, test)
    validation = _evenly(len(rest), held_out)
    return Split(
        train=tuple(sorted(np.delete(rest, validation).tolist())),
        validation=tuple(sorted(rest[validation].tolist())),
        test=tuple(sorted(ids[test].tolist())),
    )


def split_in_time(trace: Trace, share: float = HELD_OUT) -> Split:
    """Split each request in time: first tokens for training, then equal shares for validation and test.

    Raises:
        UsageError: there is no request, or a request has too few tokens.
    """
    tokens = {row["request"]: row["tokens"] for row in trace.requests.to_pylist() if row["tokens"]}
    held_out = {request: int(share * count) for request, count in tokens.items()}
    if not tokens or min(held_out.values()) < 2:
        raise UsageError(
            f"{trace.path} holds {len(tokens)} requests with {trace.num_tokens} tokens, too few to hold any out: at "
            f"least {_FEWEST} requests, or {-(-2 // share):.0f} tokens each of fewer; capture more"
        )
    return Split(
        train=tuple(sorted(tokens)),
        in_time={
            "train": {request: range(count - 2 * held_out[request]) for request, count in tokens.items()},
            "validation": {r: range(count - 2 * held_out[r], count - held_out[r]) for r, count in tokens.items()},
            "test": {request: range(count - held_out[request], count) for request, count in tokens.items()},
        },
    )


def _split(trace: Trace, seed: int, share: float, needs: Collection[str]) -> Split:
    """Split by requests if there are enough, else in time.

    Raises:
        UsageError: there are too few requests and tokens; or a required column depends on held-out tokens.
    """
    rows = [row for row in trace.requests.to_pylist() if row["tokens"]]
    if len(rows) >= _FEWEST:
        return split_requests(trace, seed, share)
    split = split_in_time(trace, share)
    assert split.in_time is not None
    cut = [row["request"] for row in rows if split.in_time["train"][row["request"]].stop < row["prompt_tokens"]]
    if "embeddings" in needs and cut:
        raise UsageError(
            f"{trace.path} is split in time within the prompt of request {cut[0]}, whose mean embedding depends on "
            f"held-out tokens; capture more prompts, or more new tokens"
        )
    return split


def _evenly(length: int, count: int) -> np.ndarray:
    """Return `count` evenly spaced positions among `length`, so that each task has its share."""
    return ((np.arange(count) + 0.5) * length / count).astype(int)


def train(
    predictor: str,
    trace: Path,
    out: Path,
    *,
    options: Mapping[str, Any] | None = None,
    fit: FitOptions = FIT,
    seed: int = 0,
    overwrite: bool = False,
    resume: bool = False,
) -> dict[str, Any]:
    """Train a predictor on the training requests of a trace and save it.

    Args:
        predictor: a file of predictors/, or a dotted module.
        options: values for the predictor's `Options`. Options that enable columns of the trace are on by default if the
            trace has them.
        seed: seed of split, initial weights, sample order and dropout; on one machine the same seed gives the same
            weights.
        resume: continue a fit that was killed, from the checkpoint of `fit.checkpoint`.

    Effects: writes `out`, whole or not at all. Shows progress where stderr is a terminal. Of several processes of one
    fit (`fit.trainer`), the first writes, and the others end here.

    Returns:
        The card.

    Raises:
        UsageError: no such trace, predictor or option; too few requests or tokens; `out` or a checkpoint exists; the
            checkpoint is to be in `out`; or options of a fit for a predictor without one.
        MismatchError: the trace is damaged or lacks a column, or the checkpoint is damaged or of another fit.
        CapacityError: the predictor takes more memory than there is.
        MoetoolError: the loss is not finite, or `out` cannot be written.
    """
    durable.require_absent(out, overwrite, "card.json")
    began = time.perf_counter()
    source = Trace(trace)
    options = options_for(predictor, source.columns, options or {})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            model = build(predictor, source.spec, options)
        except (MemoryError, RuntimeError, TypeError, ValueError) as error:
            if not isinstance(error, MemoryError) and not re.search("alloc|[Oo]verflow|too big", str(error)):
                raise  # those are torch's and numpy's words for sizes
            raise CapacityError(f"{predictor} is too large ({first_line(error)}); give smaller options") from None
    source.require(model.needs, predictor)
    if not model.learned and (resume or fit.checkpoint or fit.trainer):
        raise UsageError(f"{predictor} is counted, not fitted; leave out --resume, fit.checkpoint and fit.trainer")
    if fit.checkpoint is not None and fit.checkpoint.resolve().is_relative_to(out.resolve()):
        raise UsageError(
            f"fit.checkpoint {fit.checkpoint} is in --out {out}, which is written anew; choose a directory elsewhere"
        )
    split = _split(source, seed, fit.held_out, model.needs)
    tokens = {part: num_tokens(source, split.part(part)) for part in ("train", "validation")}
    if min(tokens.values()) < 2:
        raise UsageError(
            f"{trace} gives {tokens['train']} training and {tokens['validation']} validation tokens, expected at least "
            f"2 of each; capture more prompts"
        )
    try:
        with _folder(out, overwrite, fit) as staged:
            train_tokens = read(source, model.needs, split.part("train"), staged)
            model.count(train_tokens)
            fitted: dict[str, Any] = {}
            if model.learned:
                from moetool.training import fitting

                fitted = fitting.fit(
                    model,
                    model.prepare(train_tokens),
                    model.prepare(read(source, model.needs, split.part("validation"), staged)),
                    fit,
                    seed=seed,
                    folder=staged,
                    facts={"predictor": predictor, "options": options, "trace": source.sha256},
                    resume=resume,
                )
            facts = {
                "seed": seed,
                "trace": {"sha256": source.sha256, "requests": source.requests.num_rows, "tokens": source.num_tokens},
                "requests": {"train": split.train, "validation": split.validation, "test": split.test},
                "in_time": None if split.in_time is None else _spans(split.in_time),
                "seen_prompts": sorted(
                    frozenset().union(*prompt_digests(source, {*split.train, *split.validation}).values())
                ),
                "tokens": tokens,
                "fit": fitted,
                "seconds": round(time.perf_counter() - began, 2),
                "versions": {"python": platform.python_version(), "torch": torch.__version__},
            }
            card = save(model, staged, facts)
            (staged / "README.md").write_text(_readme(card), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise MoetoolError(
            f"cannot write the predictor to {out}: {error}; free space or choose another --out"
        ) from error
    return card


@contextlib.contextmanager
def _folder(out: Path, overwrite: bool, fit: FitOptions) -> Iterator[Path]:
    """Open the folder that becomes `out`; for further processes of a fit, one that goes, and the process with it."""
    if fit.trainer:
        from moetool.training.fit_trainer import is_first_process

        if not is_first_process(fit):
            with tempfile.TemporaryDirectory() as scratch:
                yield Path(scratch)
            raise SystemExit(0)
    with durable.staged_directory(out, overwrite, "card.json") as staged:
        yield staged


def options_for(predictor: str, columns: Collection[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return these options, with the missing ones that enable the trace's columns set to true."""
    looks_at: Mapping[str, str] = plugins.load("predictor", predictor).Predictor.looks_at
    return {option: True for column, option in looks_at.items() if column in columns} | dict(options)


def _spans(in_time: Mapping[str, Mapping[int, range]]) -> dict[str, dict[str, list[int]]]:
    """Return the ranges of a split in time, for the card."""
    return {
        name: {str(request): [span.start, span.stop] for request, span in spans.items()}
        for name, spans in in_time.items()
    }


def _readme(card: Mapping[str, Any]) -> str:
    spec, fit = card["spec"], card["fit"]
    requests = ", ".join(f"{len(ids)} {part}" for part, ids in card["requests"].items())
    if card["in_time"]:
        requests = f"{len(card['requests']['train'])}, split in time: the last tokens are held out"
    fitted = (
        f"Fitted on {fit['tokens']:,} tokens for {fit['epochs']} epochs (passes over every layer of every token), "
        f"until {_STOPPED[fit['stopped_by']]}; the best, epoch {fit['best_epoch']}, has a validation loss of "
        f"{fit['validation_loss'][fit['best_epoch'] - 1]:.4f}."
        if fit
        else "Counted, without training."
    )
    return f"""# {card["predictor"]} for {spec["name"]}

Predicts which of the {spec["num_experts_L"][0]} experts each token will use in the next of {len(spec["layer_ids_L"])}
MoE layers. Works for this model only (revision `{spec["revision"][:12]}`).

- Made by moetool {card["moetool_version"]} from the trace `{card["trace"]["sha256"][:12]}`, seed {card["seed"]}.
- Requests: {requests}. Counted on {card["tokens"]["train"]:,} tokens.
- {fitted}
- {card["parameters"]:,} parameters, {card["weights"]["bytes"]:,} bytes.

Score it on held-out requests:

    moetool evaluate DIR --trace TRACE
"""
