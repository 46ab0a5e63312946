"""Make or compare the record; see the package."""

import os

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.frozen.record import Change, Kinds, Record, changes, commit, machine, table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description="Hashes of what moetool computes.")
    parser.add_argument("action", choices=("make", "compare"))
    parser.add_argument("file", type=Path, nargs="?", default=Path("build/frozen.json"))
    parser.add_argument("--only", default="", help="Beginning of case names, e.g. 'gguf Q4_K' (default: all)")
    parser.add_argument("--seconds", action="store_true", help="Print processor seconds by subject")
    given = parser.parse_args(arguments)
    if given.action == "compare":
        before = Record.load(given.file)
        if others := changes({"": before.machine}, {"": machine()}):
            return _other_machine(given.file, before, others)
    torch.set_num_threads(1)
    made_from = commit() if given.action == "make" else before.commit
    cases = run(given.only, given.seconds)
    failed = {name: kinds["failed"] for name, kinds in cases.items() if "failed" in kinds}
    if given.action == "make":
        if failed:
            print(*(f"{name}: {error}" for name, error in failed.items()), sep="\n")
            print(f"{len(failed)} of {len(cases)} cases failed; nothing was written")
            return 1
        Record(commit=made_from, machine=machine(), cases=cases).save(given.file)
        print(f"{len(cases)} cases of {made_from[:12]} recorded in {given.file}")
        return 0
    recorded = {name: kinds for name, kinds in before.cases.items() if name.startswith(given.only)}
    found = changes(recorded, cases)
    if not found:
        print(f"{len(cases)} cases are those of {before.commit[:12]}")
        return 0
    print(table(found, recorded))
    for name, error in failed.items():
        print(f"{name} failed: {error}")
    print(f"{len({change.case for change in found})} of {len(cases)} cases are not those of {before.commit[:12]}")
    return 1


def run(only: str, seconds: bool) -> dict[str, Kinds]:
    """Run the cases whose names begin so."""
    from tests.frozen.cases import subjects

    made: dict[str, Kinds] = {}
    for subject, cases in subjects():
        if not (subject.startswith(only) or only.startswith(subject)):
            continue
        began = time.process_time()
        try:
            for name, run_case in cases():
                if name.startswith(only):
                    made[name] = _attempt(run_case)
        except Exception as error:  # the model could not be written
            made[subject] = {"failed": _line(error)}
        gc.collect()
        gc.freeze()  # transformers collects whenever a cache closes: half of the time, over all imported objects
        if seconds:
            print(f"{time.process_time() - began:6.1f} s  {subject}", flush=True)
    return made


def _attempt(run_case: Callable[[], Kinds]) -> Kinds:
    """A case's kinds; `failed` alone if it raised."""
    try:
        return run_case()
    except Exception as error:
        return {"failed": _line(error)}


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _other_machine(file: Path, before: Record, others: list[Change]) -> int:
    """Say why the hashes of a record mean nothing here."""
    print(f"{file} was made elsewhere, and hashes hold only where they were made:")
    print(*(f"  {one.kind}: recorded {one.before}, here {one.now}" for one in others), sep="\n")
    print(
        "Make it again here from the commit before the change: git worktree add ../before COMMIT, copy tests/frozen "
        f"there if it lacks it, and run 'make -C ../before freeze FROZEN={file.absolute()}'"
    )
    return 2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="frozen-cache-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # no warm start from earlier runs
        sys.exit(main())
