"""The command line: which commands there are, and the one place where errors become messages and exit codes.

Each group of commands is a module beside this one.
"""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moetool import __version__, garbage, tables
from moetool.cli import (
    cache_plans,
    capture,
    cluster_bench,
    examples,
    machine,
    paper_bench,
    placement,
    reference,
    replay,
    report,
    serve_bench,
    serving,
    simulation,
    trace,
    training,
)
from moetool.errors import MoetoolError

# What the machine refuses is no bug of ours: full disks and quotas, permissions, read-only file systems.
_OUTSIDE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENAMETOOLONG}
    | {errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}
)

_OURS = ("moetool", "predictors")
"""Packages whose absence is a bug of ours."""

_INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the signal's number."""

_WrongLine: Any = typer.BadParameter.__base__
"""Click's UsageError, of whichever Click Typer uses."""

_ORDER = (
    *("capture", "train", "evaluate", "replay", "plan", "serve", "chat", "simulate", "bench", "report", "trace"),
    *("profile", "reference", "models", "data", "doctor", "demo"),
)


class _Commands(TyperGroup):
    """The commands in the order in which they are met, groups of commands among them."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return sorted(
            super().list_commands(ctx), key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)
        )


app = typer.Typer(
    name="moetool",
    cls=_Commands,
    help="Capture the routing of Mixture-of-Experts models, learn it, plan by it, serve a model larger than memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
trace_app = typer.Typer(help="Look at traces, part and join them, and exchange them with others.", no_args_is_help=True)
plan_app = typer.Typer(help="Decide where experts live.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure what belongs together, side by side.", no_args_is_help=True)
reference_app = typer.Typer(help="Make a small model like the embedded one.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
app.add_typer(plan_app, name="plan")
app.add_typer(bench_app, name="bench")
app.add_typer(reference_app, name="reference")
for commands in (capture, training, replay, serving, simulation, report, machine):
    commands.register(app)
for commands in (cache_plans, placement):
    commands.register(plan_app)
for commands in (serve_bench, cluster_bench, paper_bench):
    commands.register(bench_app)
reference.register(reference_app)
trace.register(trace_app)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where its files go; replaced if they are there.")] = Path("moetool-demo"),
) -> None:
    """The whole pipeline on the embedded model: capture, train, evaluate, plan, serve, compare."""
    from moetool.demo import run

    run(out)


examples.explain(app)


def main() -> None:
    """The console script.

    Effects: collects garbage less often than usual; exits with 0, with the code of the MoetoolError that was raised,
        or, on a bug, with a traceback.
    """
    garbage.rarely()
    try:
        code = app(prog_name="moetool", standalone_mode=False) or 0
        if code == _INTERRUPTED:  # of Typer, which says nothing
            _fail("stopped", code)
        sys.exit(code)
    except _WrongLine as error:
        said = error.format_message().rstrip(".")  # nothing where the help has been printed instead
        see = error.ctx.command_path if error.ctx is not None else "moetool"
        _fail(f"{said[:1].lower()}{said[1:]} (see {see} --help)" if said else "", error.exit_code)
    except typer.Abort:
        _fail("stopped", 1)
    except MoetoolError as error:
        if os.environ.get("MOETOOL_DEBUG") == "1":
            raise
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", *_OURS) or os.environ.get("MOETOOL_DEBUG") == "1":
            raise
        _fail(
            f"this command needs the package {package}, which is not installed whole ({error}); install it with: "
            f"pip install {package}",
            1,
        )
    except OSError as error:
        if error.errno not in _OUTSIDE or os.environ.get("MOETOOL_DEBUG") == "1":
            raise
        _fail(f"{error.strerror}: {error.filename or 'the disk'}; what was there before is unchanged", 1)


def _fail(message: str, code: int) -> None:
    if message:
        tables.narrate(f"moetool: {' '.join(message.split())}")
    sys.exit(code)


if __name__ == "__main__":
    main()
