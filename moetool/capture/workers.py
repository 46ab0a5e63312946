"""Capture by several processes, which share whole batches; the trace equals that of one process.

The prompts' order fixes the batches in advance, and their rows do not depend on the process. All processes write to the
capture's stage; the first one assembles the trace.
"""

import logging
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from moetool.base.child_process import end_with_parent
from moetool.base.errors import MoetoolError
from moetool.base.tables import complain
from moetool.capture.resume import CaptureFolder
from moetool.capture.run import (
    NEW_RUN,
    Captured,
    CaptureOptions,
    OpenModel,
    RunSetup,
    enter_stage,
    finish,
    open_plan,
    run_batches,
)
from moetool.prompts.gather import Prompt

_LOG = logging.getLogger(__name__)


def capture_with_workers(
    model: str,
    prompts: list[Prompt],
    out: Path,
    options: CaptureOptions,
    workers: int,
    setup: RunSetup = NEW_RUN,
) -> Captured:
    """Capture with several processes on this machine; arguments and errors are those of `capture`.

    Each uses one thread by default, since processes that compete for cores are slower.

    Effects: starts `workers` - 1 processes and captures in this one too. They always end with it.

    Raises:
        MoetoolError: a worker failed; its own message is on stderr.
    """
    began = time.perf_counter()
    options = replace(options, threads=options.threads or 1)
    plan, open_model = open_plan(model, prompts, out, options, setup)
    with enter_stage(plan, out, setup) as stage:
        missing = [] if stage.finished() else stage.missing()
        shares = [share for i in range(workers) if (share := missing[i::workers])]
        context = multiprocessing.get_context("spawn")
        memory = replace(setup.memory, composition=plan.composition)
        child = RunSetup(memory=memory, open_model=setup.open_model, overwrite=True, resume=True)
        processes = [
            context.Process(target=_child, args=(i, model, prompts, out, options, share, child), daemon=True)
            for i, share in enumerate(shares[1:], start=1)
        ]
        for process in processes:
            process.start()
            _LOG.info("%s started as process %d", process.name, process.pid)
        try:
            run_batches(stage, shares[0] if shares else [], open_model, setup.on_progress)
            for i, process in enumerate(processes, start=1):
                process.join()
                if process.exitcode != 0:
                    raise MoetoolError(f"worker {i} of {workers} ended with exit code {process.exitcode}; see above")
        finally:
            for process in processes:
                process.kill()
                process.join()
        return finish(stage, setup.overwrite, began)


def capture_under_torchrun(
    model: str,
    prompts: list[Prompt],
    out: Path,
    options: CaptureOptions,
    setup: RunSetup = NEW_RUN,
) -> Captured | None:
    """Capture this process's share under `torchrun` (RANK and WORLD_SIZE are set); `out` must be on a shared disk.

    Returns:
        The result in the process of rank 0; None in others.
    """
    import torch.distributed as dist

    began = time.perf_counter()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        options = replace(options, threads=options.threads or 1)
        setup = replace(setup, memory=replace(setup.memory, processes=int(os.environ.get("LOCAL_WORLD_SIZE", world))))

        def share(stage: CaptureFolder, open_model: OpenModel) -> None:
            missing = [] if stage.finished() else stage.missing()
            dist.barrier()  # all have seen the same batches
            run_batches(stage, missing[rank::world], open_model, setup.on_progress)
            dist.barrier()  # all batches are there

        if rank > 0:
            dist.barrier()  # the stage has the composition
            plan, open_model = open_plan(model, prompts, out, options, replace(setup, resume=True))
            share(CaptureFolder(out, plan), open_model)
            return None
        plan, open_model = open_plan(model, prompts, out, options, setup)
        with enter_stage(plan, out, setup) as stage:
            dist.barrier()
            share(stage, open_model)
            return finish(stage, setup.overwrite, began)
    finally:
        dist.destroy_process_group()


def under_torchrun() -> bool:
    """Whether this process was started by torchrun as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _child(
    worker: int,
    model: str,
    prompts: list[Prompt],
    out: Path,
    options: CaptureOptions,
    batches: list[int],
    setup: RunSetup,
) -> None:
    """Run a worker process, with one-line errors."""
    end_with_parent()
    try:
        plan, open_model = open_plan(model, prompts, out, options, setup)
        run_batches(CaptureFolder(out, plan), batches, open_model)
    except MoetoolError as error:
        complain(f"moetool: worker {worker}: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(1)  # the first process reports
