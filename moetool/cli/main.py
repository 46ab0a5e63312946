"""The command line: its commands, and the one place where errors become messages and exit codes.

Each group of commands is another module of this package.
"""

import errno
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from moetool import __version__
from moetool.base import garbage, logs, plugins, tables
from moetool.base.errors import CapacityError, MoetoolError
from moetool.cli import (
    advise,
    bench,
    cache_plans,
    capture,
    examples,
    fit,
    guide,
    interrupt,
    machine,
    placement,
    replay,
    report,
    serving,
    simulation,
    trace,
    training,
    user_cache,
    verify,
)
from moetool.cli.flags import Quiet, Verbose, listening, shorten_types

# Refusals of the machine are not bugs of moetool: full disks and quotas, permissions, read-only file systems.
_OUTSIDE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENAMETOOLONG}
    | {errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}
)
_UNCHANGED = "what was there before is unchanged"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"{_UNCHANGED}; free space, or write elsewhere"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or choose another path"),
    errno.EROFS: "choose another path",
}

OURS = ("moetool", "predictors")
"""Packages whose absence is a bug of moetool."""

_FIT = {"fit.": "moetool.training.fit_options:FitOptions"}
_SERVE = {"": "moetool.runtime.serve_options:ServeOptions"}
_OPTIONS = {
    "capture": {"data.": "moetool.prompts.gather:DataOptions"},
    "train": _FIT,
    "serve": {"server.": "moetool.serving.server_options:ServerOptions", **_SERVE},
    "simulate": {"": "moetool.simulation.simulation_options:SimulationOptions"},
    "plan cache": _SERVE,
    "bench predictors": _FIT,
}
"""Classes of the settings of a command, by the prefix of their names."""

_WrongLine: Any = typer.BadParameter.__base__
"""Click's UsageError, from the Click that Typer uses."""

_ORDER = (
    *(
        "fit",
        "advise",
        "capture",
        "train",
        "evaluate",
        "replay",
        "plan",
        "serve",
        "chat",
        "verify",
        "simulate",
        "bench",
    ),
    *("report", "trace", "profile", "models", "data", "doctor", "cache", "demo", "guide"),
)


class _Command(TyperCommand):
    """A command that names all missing parameters at once.

    Its `--help` shows no type, like the other switches (`shorten_types`).
    """

    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except typer.BadParameter as error:
            options, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            missing: list[Any] = [
                parameter
                for parameter in self.get_params(ctx)
                if parameter.required and parameter.value_is_missing(parameter.consume_value(ctx, options)[0])
            ]
            if error.param not in missing or len(missing) == 1:
                raise
            said = (type(error)("", ctx, parameter).format_message() for parameter in missing)
            names = ", ".join(line.removeprefix("Missing ").rstrip(".") for line in said)
            raise _WrongLine(f"missing {names}", ctx) from None


class _Group(TyperGroup):
    """A group of commands, with the same `--help`."""

    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))


def _without_type(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


class _Commands(_Group):
    """Commands and groups of commands in the order of use."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return sorted(
            super().list_commands(ctx), key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)
        )


app = typer.Typer(
    name="moetool",
    cls=_Commands,
    help="Capture expert routing, predict it, plan caches and placements, and serve MoE models larger than memory.",
    no_args_is_help=True,
    epilog="First steps: 'moetool demo', then 'moetool guide quickstart'.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
trace_app = typer.Typer(cls=_Group, help="Inspect, split, merge and convert traces.", no_args_is_help=True)
plan_app = typer.Typer(cls=_Group, help="Plan expert caches and placements.", no_args_is_help=True)
bench_app = typer.Typer(cls=_Group, help="Run paired benchmarks.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
app.add_typer(plan_app, name="plan")
app.add_typer(bench_app, name="bench")
_COMMANDS: dict[typer.Typer, dict[str, Callable[..., None]]] = {
    app: {
        "fit": fit.fit,
        "advise": advise.advise,
        "capture": capture.capture,
        "train": training.train,
        "evaluate": training.evaluate,
        "replay": replay.replay,
        "serve": serving.serve,
        "chat": serving.chat,
        "verify": verify.verify,
        "simulate": simulation.simulate,
        "report": report.report,
        "profile": machine.profile,
        "doctor": machine.doctor,
        "models": machine.models,
        "data": machine.data,
        "cache": user_cache.cache,
        "guide": guide.guide,
    },
    plan_app: {
        "cache": cache_plans.plan_cache,
        "maps": cache_plans.plan_maps,
        "alpha": cache_plans.plan_alpha,
        "placement": placement.placement,
        "score": placement.score,
        "compare": placement.compare,
        "migrate": placement.migrate,
        "export": placement.export,
    },
    bench_app: {
        "serve": bench.serve,
        "policies": bench.policies,
        "predictors": bench.predictors,
        "rivals": bench.rivals,
        "gpu": bench.gpu,
        "cluster": bench.cluster,
        "paper": bench.paper,
        "show": bench.show,
    },
    trace_app: {
        "info": trace.info,
        "head": trace.head,
        "split": trace.split,
        "merge": trace.merge,
        "diff": trace.diff,
        "export": trace.export,
        "import": trace.import_files,
    },
}
for group, commands in _COMMANDS.items():
    for name, command in commands.items():
        group.command(name, cls=_Command)(command)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    logs.set_verbosity(verbose, quiet)


@app.command(cls=_Command)
def demo(
    out: Annotated[Path, typer.Option(help="Output directory; the files of an earlier demo are replaced.")] = Path(
        "moetool-demo"
    ),
) -> None:
    """Run the whole pipeline on the embedded toy model: capture, train, evaluate, plan, serve, compare."""
    from moetool.cli.demo import run

    run(out)


examples.explain(app)
shorten_types(app)
listening(app)


def main() -> None:
    """The console script.

    Effects: collects garbage less often than usual; lets NumPy use one thread; starts a thread (`tables.start_line`).
    Exits with 0, with the code of a MoetoolError, or with a traceback on a bug.
    """
    garbage.rarely()
    # NumPy's products here are small: on busy cores its threads make planning ten times as slow.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    plugins.allow_from(sys.argv[1:])
    try:
        interrupt.raises()
        with tables.start_line():
            _run()
    except (KeyboardInterrupt, Exception) as error:
        if not interrupt.is_behind(error):
            raise
        _fail("stopped", interrupt.EXIT_CODE)
    finally:
        interrupt.ends_process()


def _as_setting(error: Any) -> str:
    """Advice on an unknown long option of a command that has --set; else empty."""
    unknown = hasattr(error, "possibilities")  # an option without its value is an error with a name, too
    if not unknown or error.ctx is None or not error.option_name.startswith("--"):
        return ""
    option = next((option for option in error.ctx.command.params if "--set" in option.opts), None)
    if option is None:
        return ""
    name = error.option_name[2:].replace("-", "_")
    command = error.ctx.command_path.partition(" ")[2]
    settings = {setting.rpartition(".")[2]: setting for setting in _settings(command, option.help or "")}
    initials = {"".join(re.findall(r"(?:^|_)(.)", part)): part for part in settings if "_" in part}
    nearest = [initials[name]] if name in initials else get_close_matches(name, settings, 1, 0.75)
    return f"; a setting is given as --set {settings[nearest[0]]}=VALUE" if nearest else ""


def _settings(command: str, help: str) -> list[str]:
    """Names of a command's settings: those in the help of --set, and those of its classes of options."""
    named = re.findall(r"\b[a-z]\w+(?:\.[a-z]\w+)+|\b[a-z]+(?:_[a-z]+)+|\b[a-z]+(?==)", help)
    for prefix, place in _OPTIONS.get(command, {}).items():
        module, _, kind = place.partition(":")
        named += [prefix + field.name for field in fields(getattr(import_module(module), kind))]
    return named


def _run() -> None:
    try:
        code = app(prog_name="moetool", standalone_mode=False) or 0
        if code == interrupt.EXIT_CODE:  # from Typer, which prints nothing
            _fail("stopped", code)
        sys.exit(code)
    except _WrongLine as error:
        said = error.format_message().rstrip(".")  # empty where the help was printed instead
        see = error.ctx.command_path if error.ctx is not None else "moetool"
        said += _as_setting(error)
        _fail(f"{said[:1].lower()}{said[1:]} (see {see} --help)" if said else "", error.exit_code)
    except typer.Abort:
        _fail("stopped", 1)
    except MoetoolError as error:
        if os.environ.get("MOETOOL_DEBUG") == "1":
            raise
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", *OURS) or os.environ.get("MOETOOL_DEBUG") == "1":
            raise
        place = plugins.foreign_place(error)
        needs = "this command needs" if place is None else f"{place} imports"
        own = package in sys.stdlib_module_names
        remedy = "use a Python that was built with it" if own else f"install it with: pip install {package}"
        _fail(f"{needs} the package {package}, which is not fully installed ({error}); {remedy}", 1)
    except MemoryError:
        if os.environ.get("MOETOOL_DEBUG") == "1":
            raise
        _fail("out of memory; choose smaller sizes or close other programs", CapacityError.exit_code)
    except OSError as error:
        if error.errno not in _OUTSIDE or os.environ.get("MOETOOL_DEBUG") == "1":
            raise
        where = error.filename or "the disk"
        _fail(f"{error.strerror}: {where}; {_REMEDIES.get(error.errno, _UNCHANGED)}", 1)
    except Exception as error:
        place = None if os.environ.get("MOETOOL_DEBUG") == "1" else plugins.foreign_place(error)
        if place is None or interrupt.is_behind(error):
            raise
        _fail(f"{type(error).__name__}: {error} (from {place}); MOETOOL_DEBUG=1 shows the traceback", 1)


def _fail(message: str, code: int) -> None:
    if message:
        tables.complain(f"moetool: {' '.join(message.split())}")
    sys.exit(code)


if __name__ == "__main__":
    main()
