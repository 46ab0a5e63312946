"""Flags shared by several commands, and the parsing of their values."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from typer.models import OptionInfo

from moetool.base import assets, durable, logs, tables
from moetool.base.bounded_read import read_toml
from moetool.base.config import MOST_THREADS, parse, parse_bytes
from moetool.base.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from moetool.base.types import ModelSpec
    from moetool.trace.reader import Trace
    from moetool.trace.same_prompts import Overlap
    from moetool.training.predictor import Predictor


def note(line: str) -> None:
    """Narrate what a command has chosen or left out."""
    tables.narrate(f"moetool: {line}")


def open_trace(path: Path) -> "Trace":
    """Open a trace for a command. Raises: as `Trace`. Effects: prints a note if the trace is not closed."""
    from moetool.trace.reader import Trace

    trace = Trace(path)
    if not trace.closed:
        tables.narrate(
            f"moetool: {path}: {describe_state(trace)}; {tables.count(trace.num_tokens)} tokens so far are used"
        )
    return trace


def open_predictor(path: Path | None) -> "Predictor | None":
    """Load the predictor of a flag, if given. Raises: as `moetool.training.predictor.load_predictor`."""
    if path is None:
        return None
    from moetool.training.predictor import load_predictor

    return load_predictor(path)


def find_overlap(trace: "Trace", predictor: "Predictor | None") -> "Overlap":
    """Find the requests that a predictor, if any, was trained on; print how many others may be among them."""
    from moetool.trace.same_prompts import Overlap, trained_on

    if predictor is None:
        return Overlap(repeated=frozenset(), undecided=0)
    found = trained_on(trace, predictor.card)
    if found.undecided:
        many = tables.numbered(found.undecided, "request")
        note(f"{many} of {trace.path} may repeat prompts of the training, which one of the traces did not record")
    return found


def describe_state(trace: "Trace") -> str:
    """Describe whether a trace is complete, and if not, why."""
    if trace.closed:
        return "complete and unchanged"
    if durable.is_being_written(trace.path):
        return "still being written; complete so far"
    return "its server was killed or could not write; complete up to that point"


def _use_recipe(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take the defaults of a command's flags from a TOML file; explicit flags win."""
    if path is None:
        return None
    if not path.exists():
        path = assets.recipe(path) or path
    try:
        values = read_toml(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the recipe {path}: {error}") from None
    flags = _flags(ctx)
    for name in values:
        if name.replace("-", "_") not in flags:
            raise unknown_name("flag", name, set(flags), f"{ctx.command_path} in {path}")
    ctx.default_map = {flags[name.replace("-", "_")]: value for name, value in values.items()}
    return path


def _flags(ctx: typer.Context) -> dict[str, str]:
    """Return the command's parameters by their names in a recipe: the flags' names, and also `settings` for `set`."""
    names: dict[str, str] = {}
    for parameter in ctx.command.params:
        if parameter.name is None or parameter.name in ("recipe", "help", "verbose", "quiet"):
            continue
        for spelling in (parameter.name, *parameter.opts):
            names[spelling.lstrip("-").replace("-", "_")] = parameter.name
    return {name: names[name] for name in names if name != "as_json"}


def settable(what: str) -> Any:
    """Return the option `--set` of a command with a help text of its settings."""
    return typer.Option("--set", help=f"{what} Repeatable.")


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="'reference' (embedded toy model), a Hugging Face directory, a .gguf file, or a hub name: "
        "org/model or org/model/FILE.gguf.",
    ),
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub model, e.g. main.")]
TraceDir = Annotated[Path, typer.Option("--trace", help="Trace directory.")]
Out = Annotated[Path, typer.Option("--out", help="Output directory, written atomically.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Overwrite existing output.")]
Jobs = Annotated[
    int,
    typer.Option(
        min=0, max=MOST_THREADS, help="Processes that share the replays (0 = one per processor for a large trace)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PredictorDir = Annotated[Path | None, typer.Option("--predictor", help="Directory of a trained predictor.")]
ProfileFile = Annotated[Path | None, typer.Option("--profile", help="Machine costs from 'moetool profile'.")]
ServedDevice = Annotated[
    str | None, typer.Option("--device", help="Compute device: cpu or cuda (default: cuda if present, else cpu).")
]
ServedHostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        help="Host memory that caches experts between disk and device, e.g. 32GB (default: 0.8 of the free "
        "RAM with a GPU, else none).",
    ),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="MOETOOL_API_KEY", show_default=False, help="API key that clients must send.")
]
Recipe = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        help="TOML file with values for these options, or a shipped one, e.g. reference/capture.",
        is_eager=True,
        callback=_use_recipe,
    ),
]


Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Log events, like MOETOOL_LOG=info (-vv: also every forward).",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors: no messages, no progress.")]


def listening(app: typer.Typer) -> None:
    """Let every command of an application take -v and -q after its name too, hidden from its help."""
    for command in app.registered_commands:
        assert command.callback is not None
        command.callback = _with_verbosity(command.callback)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        listening(group.typer_instance)


def _with_verbosity(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def command(*, verbose: int, quiet: bool, **values: Any) -> Any:
        if verbose or quiet:
            logs.set_verbosity(verbose, quiet)
        return callback(**values)

    count = Annotated[int, typer.Option("--verbose", "-v", count=True, hidden=True)]
    off = Annotated[bool, typer.Option("--quiet", "-q", hidden=True)]
    own = inspect.signature(callback)
    more = [
        inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=count),
        inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=off),
    ]
    command.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])  # type: ignore[attr-defined]
    command.__annotations__ = {**callback.__annotations__, "verbose": count, "quiet": off}
    return command


def shorten_types(app: typer.Typer) -> None:
    """Show short types in the help of every option of an application, and none for switches, which take no value."""
    callbacks = [command.callback for command in app.registered_commands]
    if app.registered_callback is not None:
        callbacks.append(app.registered_callback.callback)
    for callback in filter(None, callbacks):
        for parameter in inspect.signature(callback).parameters.values():
            kind, *infos = get_args(parameter.annotation) or (parameter.annotation,)
            for info in infos:
                if isinstance(info, OptionInfo) and info.metavar is None:
                    info.metavar = _short_type(kind, info)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        shorten_types(group.typer_instance)


def _short_type(kind: Any, info: OptionInfo) -> str:
    if info.default == "--set":  # Typer keeps an option's first name there
        return "<key=value>"
    kinds = [one for one in get_args(kind) or (kind,) if one is not type(None)]
    if kinds == [bool] or info.count:
        return ""
    if get_origin(kind) is list:
        return "<list>"
    return f"<{kinds[0].__name__.lower()}>"


def memory_bytes(option: str, text: str | None) -> int | None:
    """Parse an option's amount of memory, if given. Raises: UsageError: the text, named by its option, is not one."""
    try:
        return None if text is None else parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def listed(values: list[str]) -> list[str]:
    """Split repeated and comma-separated values into a list; an existing path with a comma stays whole."""
    parts = [part for value in values for part in ([value] if _exists(value) else value.split(",")) if part]
    if not parts:
        raise UsageError(f"{values!r} names nothing; give at least one")
    return parts


def _exists(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # a list longer than a file name may be is not a path
        return False


def require_policies(names: list[str], options: dict[str, Any]) -> None:
    """Raise UsageError for a setting that is not an option of any policy.

    Effects: `policy.OPTION`, the spelling of `moetool serve`, becomes the option of a single named policy.
    """
    if len(names) == 1 and isinstance(options.get("policy"), dict) and isinstance(options.get(names[0], {}), dict):
        options[names[0]] = {**options.pop("policy"), **options.get(names[0], {})}
    if stray := [name for name in options if name not in names or not isinstance(options[name], dict)]:
        why = f"fits none of {', '.join(names)}; write POLICY.OPTION=VALUE" if names else "has no effect; leave it out"
        raise UsageError(f"--set {stray[0]!r} {why}")


def named_timeline(name: str, profile: Path | None, spec: "ModelSpec", values: Any) -> tuple[Any, Any]:
    """Return the profile of a model on a named machine, and the options of the timeline.

    Raises:
        UsageError: the machine is unknown or lacks figures, or a profile is given too.
    """
    from moetool.costing.machine_profile import machine_profile
    from moetool.costing.machines import read_named_machine
    from moetool.costing.pricing import TimelineOptions

    if profile is not None:
        raise UsageError("--machine and --profile are both costs of a machine; give one of them")
    costs = machine_profile(read_named_machine(name), spec)
    if isinstance(values, dict):
        values = {"device": "cuda", "tier": "pinned", **values}
    return costs, parse(TimelineOptions, values, "timeline")


def read_timeline(path: Path | None, values: Any, **defaults: Any) -> tuple[Any, Any]:
    """Return the profile, if given, and the options of the timeline."""
    from moetool.costing.costs import CostProfile
    from moetool.costing.pricing import TimelineOptions

    if path is None and values:
        raise UsageError("--set timeline… has no effect without a profile; give one with --profile FILE")
    if isinstance(values, dict):
        values = {**defaults, **values}
    timeline = parse(TimelineOptions, values, "timeline")
    return (CostProfile.load(path) if path is not None else None), timeline
