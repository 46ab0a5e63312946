"""Commands of the core, in a process where the libraries of the engine cannot be imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moetool.trace.foreign.exporting import export_trace
from tests.command_line import child_environment
from tests.synthetic import make_spec, write_trace

_BLOCKED = ("torch", "transformers", "lightning", "datasets", "tokenizers", "fastapi", "uvicorn", "ray")

_RUN = """
import json, sys

for name in sys.argv[2].split(","):
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
from moetool.cli.main import main

for command in json.loads(sys.argv[1]):
    sys.argv = ["moetool", *command]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            sys.exit(ended.code)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two servers, one of them as another program's file too, and their cluster."""
    folder = tmp_path_factory.mktemp("core")
    for seed, name in enumerate(("a", "b")):
        write_trace(folder / name, make_spec(), num_requests=8, seed=seed)
    export_trace(folder / "a", "route_csv", folder / "a.csv")
    servers = "".join(f'[[servers]]\nname = "{n}"\n[[servers.gpus]]\nmemory_bytes = "15kB"\n' for n in ("a", "b"))
    (folder / "cluster.toml").write_text(servers)
    return folder


def test_the_core_runs_without_the_libraries_of_the_engine(folder: Path) -> None:
    servers = ["--trace=a=a", "--trace=b=b", "--cluster=cluster.toml"]
    shape = ["--set=num_experts=8", "--set=expert_bytes=1000"]
    commands = [
        ["trace", "import", "a.csv", *shape, "--out=imported"],
        ["trace", "info", "imported"],
        ["trace", "export", "a", "--format=route_csv", "--out=again.csv"],
        ["advise", "a"],
        ["replay", "--trace=a", "--policy=lru,lfu,foresight,belady", "--budget=50%"],
        ["plan", "placement", *servers, "--planner=prism", "--out=placement.json"],
        ["plan", "compare", *servers, "--planner=uniform,eplb,prism_exact", "--split=0.5"],
        ["plan", "export", "placement.json", "--format=sglang", "--out=sglang.json"],
        ["simulate", *servers, "--planner=uniform,prism", "--requests=4"],
        ["report", "a", "--out=page.html"],
    ]
    ran = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(commands), ",".join(_BLOCKED)],
        cwd=folder,
        env=child_environment(COLUMNS="200"),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "belady" in ran.stdout and (folder / "page.html").stat().st_size > 10_000
    assert (folder / "again.csv").read_bytes() == (folder / "a.csv").read_bytes()


@pytest.mark.parametrize(
    ("command", "library"),
    [(["serve", "reference"], "torch"), (["train", "affinity", "--trace=a", "--out=p"], "torch")],
)
def test_a_command_of_the_engine_names_the_library_that_it_lacks(
    folder: Path, command: list[str], library: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps([command]), ",".join(_BLOCKED)],
        cwd=folder,
        env=child_environment(COLUMNS="200"),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1 and len(ran.stderr.splitlines()) == 1, ran.stderr
    assert f"package {library}" in ran.stderr and f"pip install {library}" in ran.stderr
