"""The trace commands: `moetool trace info`, `head`, `split`, `merge`, `diff`, `import`, `export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetool.base import tables
from moetool.base.config import parse_settings
from moetool.base.errors import UsageError
from moetool.cli.flags import Json, Out, Overwrite, describe_state, open_trace, settable

if TYPE_CHECKING:
    from moetool.base.types import ModelSpec
    from moetool.trace.reader import Trace

Dir = Annotated[Path, typer.Argument(metavar="DIR", help="Trace directory.")]


def info(
    path: Dir,
    check: Annotated[bool, typer.Option("--check", help="Read and check every row and column.")] = False,
    as_json: Json = False,
) -> None:
    """Show a trace's contents and check its integrity."""
    from moetool.trace.expert_counts import ExpertCounts, open_workload

    source = open_workload(path)
    if isinstance(source, ExpertCounts):
        _counts_info(source.describe(), as_json)
        return
    if check:
        source.check()
    else:
        source.verify()
    found = source.describe()
    if as_json:
        tables.print_json(found)
        return
    spec = source.spec
    tables.print_paragraph(
        f"{path}: {spec.name}, {spec.num_layers} MoE layers x {spec.num_experts} experts, top-{max(spec.top_k_L)}"
    )
    tables.print_paragraph(
        f"columns {', '.join(found['columns'])}; composition {found['composition']}; {describe_state(source)}"
    )
    if found["unrecorded_prompts"]:
        tables.print_paragraph(
            f"prompt not recorded of {tables.numbered(found['unrecorded_prompts'], 'request')}: new tokens only"
        )
    rows = [
        [
            f"{row['dataset']} / {row['task'] or '-'}",
            *(tables.count(row[c]) for c in ("requests", "prompt_tokens", "new_tokens")),
        ]
        for row in found["tasks"]
    ]
    rows.append(["total", *(tables.count(found[c]) for c in ("requests", "prompt_tokens", "new_tokens"))])
    tables.print_table("", ["dataset / task", "prompts", "prompt tokens", "new tokens"], rows)
    tables.print_paragraph(
        f"{tables.count(found['bytes'], 'B')}, {found['bytes'] / max(1, found['tokens']):,.0f} bytes/token"
    )


def _counts_info(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        tables.print_json(found)
        return
    spec = found["spec"]
    tables.print_paragraph(
        f"{found['path']}: counts of {spec['name']}, {len(spec['layer_ids_L'])} MoE layers x "
        f"{max(spec['num_experts_L'])} experts, top-{max(spec['top_k_L'])}; complete and unchanged"
    )
    tables.print_paragraph(
        f"{found['passes']:,} passes, {found['tokens']:,.0f} tokens; for 'moetool plan placement', not for replay"
    )


def head(
    path: Dir,
    out: Out,
    layers: Annotated[int | None, typer.Option(help="MoE layers to keep (default: all).")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests to keep (default: all).")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Keep the first layers or requests of a trace."""
    from moetool.trace.edit import head as run

    _print(out, run(open_trace(path), out, layers=layers, requests=requests, overwrite=overwrite))


def split(
    path: Dir,
    out: Out,
    by: Annotated[str, typer.Option(help="Key to split by: task, label or request.")],
    share: Annotated[
        list[str] | None, typer.Option(help="Shares of the requests, e.g. 0.8 or 0.6,0.2; the rest is one more part.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Split a trace by task, label or shares of its requests."""
    from moetool.trace.edit import split as run

    try:
        shares = [float(part) for text in share or [] for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--share {share}: expected numbers, such as 0.8 or 0.6,0.2") from None
    for name, part in run(open_trace(path), out, by=by, shares=shares, overwrite=overwrite).items():
        _print(out / name, part)


def merge(
    paths: Annotated[list[Path], typer.Argument(metavar="DIR", help="Trace directories of one model.")],
    out: Out,
    overwrite: Overwrite = False,
) -> None:
    """Merge traces of one model."""
    from moetool.trace.merge import merge as run

    made, notes = run([open_trace(path) for path in paths], out, overwrite=overwrite)
    _print(out, made)
    for note in notes:
        tables.print_paragraph(f"  {note}")


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Trace directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Trace directory of the same prompts on a changed model.")],
    as_json: Json = False,
) -> None:
    """Compare the routing of two traces of the same prompts, layer by layer."""
    from moetool.trace.diff import diff as run
    from moetool.trace.reader import Trace

    found = run(Trace(a), Trace(b))
    if as_json:
        tables.print_json({**found.to_json(), "equal_share": found.equal_share})
        return
    tables.print_paragraph(
        f"{tables.numbered(found.requests, 'request')} in both, {tables.numbered(found.tokens, 'token')} compared; "
        f"{found.left_out:,} after the first differing token left out; {found.only_a:,} and {found.only_b:,} requests "
        "in only one trace"
    )

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    rows = [
        [
            str(one.layer),
            tables.percent(one.flip_rate, ".2f"),
            tables.percent(one.changed, ".2f"),
            *(number(x) for x in (one.margin, one.flipped_margin, one.use_bits, one.score_bits)),
        ]
        for one in found.layers
    ]
    tables.print_table(
        "", ["layer", "flips", "tokens changed", "margin", "margin, flipped", "JS use", "JS scores"], rows
    )
    tables.print_paragraph(
        f"same experts for {tables.percent(found.equal_share, '.2f')} of the tokens, mean over layers; mean flip rate "
        f"{tables.percent(found.flip_rate, '.2f')}; margins in scores, JS divergence in bits"
    )


def import_files(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="Files of one model, one per task, or addresses: hf://datasets/org/name."),
    ],
    out: Out,
    format: Annotated[
        str | None, typer.Option(help="Format of the files, e.g. vllm_routed_experts or columns (default: detected).")
    ] = None,
    columns: Annotated[
        list[str],
        typer.Option(
            "--map",
            help="Column names of a CSV, TSV, JSON or Parquet table, e.g. layer=l,expert=e,token=t (default: "
            "detected). Repeatable.",
        ),
    ] = [],
    tokens_as: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Phase if the files have none: prefill, decode (one forward per token, the first is the prompt) or "
            "answer (new tokens only, prompt not recorded) (default: decode).",
        ),
    ] = None,
    settings: Annotated[
        list[str],
        settable(
            "Facts that the files lack: model=PATH, or num_experts, top_k, expert_bytes, first_k_dense or "
            "moe_layers=1..26, num_hidden_layers; task=NAME; drop_tokens=true."
        ),
    ] = [],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Import routes or counts that another program recorded."""
    from moetool.trace.foreign.column_table import parse_map
    from moetool.trace.foreign.importing import import_trace

    def find_model(name: str) -> "tuple[ModelSpec, int | None]":
        from moetool.models.shape import shape_of

        return shape_of(name)

    made = import_trace(
        files,
        format,
        out,
        tokens_as=tokens_as,
        settings=parse_settings(settings),
        mapping=parse_map(columns) or None,
        find_model=find_model,
        overwrite=overwrite,
    )
    if made.guessed:
        tables.narrate(f"read as {made.format}: {made.guessed}; --format chooses another")
    if as_json:
        tables.print_json(made.to_json())
        return
    tasks = ", ".join(made.tasks) if len(made.tasks) < 6 else f"{len(made.tasks)} tasks"
    what = (
        f"{tasks}: {tables.numbered(made.requests, 'request')}"
        if made.kind == "trace"
        else f"{made.requests:,} {'pass' if made.requests == 1 else 'passes'}"
    )
    tables.print_paragraph(
        f"{out}: {made.model}, {what}, {tables.numbered(made.tokens, 'token')}, {tables.count(made.bytes, 'B')}"
    )
    for note in made.notes:
        tables.print_paragraph(f"  {note}")


def export(
    path: Dir,
    format: Annotated[str, typer.Option(help="Format to write, e.g. vllm_routed_experts or sglang_stat.")],
    out: Annotated[Path, typer.Option("--out", help="Output file (a directory for some formats).")],
    num_hidden_layers: Annotated[
        int | None, typer.Option(help="Number of layers, dense and MoE (needed if the last layer is dense).")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Export a trace or counts to another program's format."""
    from moetool.trace.foreign.exporting import export_trace

    made = export_trace(path, format, out, num_hidden_layers=num_hidden_layers, overwrite=overwrite)
    if as_json:
        tables.print_json(made.to_json())
        return
    tables.print_paragraph(f"{out}: {tables.count(made.bytes, 'B')}")
    for note in made.notes:
        tables.print_paragraph(f"  {note}")


def _print(out: Path, made: "Trace") -> None:
    tables.print_paragraph(
        f"{out}: {tables.numbered(len(made.requests), 'request')}, {tables.numbered(made.num_tokens, 'token')}, "
        f"{made.spec.num_layers} MoE layers"
    )
