"""Routes of real models beside the repository; some machines lack them."""

import os
from pathlib import Path

import pytest

from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace

SHARED = Path(os.environ.get("MOETOOL_SHARED", Path(__file__).parents[1].parent / "shared"))
DEEPSEEK = SHARED / "data" / "routes" / "deepseek_v2_lite"
QWEN = SHARED / "data" / "routes" / "bigmoeonedge" / "qwen3_30b_a3b.route.csv"
TASKS = ("intent", "law", "translation")

needs_routes = pytest.mark.skipif(not DEEPSEEK.is_dir(), reason="shared/data/routes is not here")


def by_task(folder: Path) -> dict[str, Trace]:
    """A trace of prompts for each task of DeepSeek-V2-Lite, written to `folder`."""
    for task in TASKS:
        import_trace([DEEPSEEK / f"{task}.parquet"], "topk_parquet", folder / task, tokens_as="prefill")
    return {task: Trace(folder / task) for task in TASKS}
