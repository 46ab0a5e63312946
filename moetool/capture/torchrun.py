"""Capture by the processes of torchrun, which share whole batches; the trace equals that of one process.

All processes write to the capture's stage; the first one assembles the trace.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from moetool.capture.resume import CaptureFolder, resumed_threads
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
        options = resumed_threads(options, out, 1) if setup.resume else replace(options, threads=options.threads or 1)
        memory = replace(setup.memory, processes=int(os.environ.get("LOCAL_WORLD_SIZE", world)), shards=world)
        setup = replace(setup, memory=memory)

        def share(stage: CaptureFolder, open_model: OpenModel) -> None:
            missing = [] if stage.finished() else stage.missing()
            dist.barrier()  # all have seen the same batches
            run_batches(stage, missing[rank::world], open_model, setup.on_progress)
            dist.barrier()  # all batches are there

        if rank > 0:
            dist.barrier()  # the stage has the composition
            plan, chosen = open_plan(model, prompts, out, options, replace(setup, resume=True))
            share(CaptureFolder(out, plan), chosen.open_model)
            return None
        plan, chosen = open_plan(model, prompts, out, options, setup)
        with enter_stage(plan, chosen, out, setup) as stage:
            dist.barrier()
            share(stage, chosen.open_model)
            return finish(stage, setup.overwrite, began)
    finally:
        dist.destroy_process_group()


def under_torchrun() -> bool:
    """Whether this process was started by torchrun as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
