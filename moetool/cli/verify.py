"""The command `moetool verify`."""

from pathlib import Path
from typing import Annotated

import typer

from moetool.base import tables
from moetool.cli.flags import Json, Model, Overwrite, Revision, ServedDevice, listed, memory_bytes


def verify(
    model: Model,
    policy: Annotated[
        list[str], typer.Option(help="Cache policies to verify, or all (default: lru, foresight, hybrimoe).")
    ] = [],
    prompts: Annotated[int, typer.Option(min=1, max=200, help="Number of embedded prompts.")] = 24,
    tokens: Annotated[int, typer.Option(min=1, max=256, help="Tokens to generate for each prompt.")] = 8,
    device: ServedDevice = None,
    device_memory: Annotated[
        str | None,
        typer.Option(help="Memory for dense weights, KV cache and experts, e.g. 8GB (default: half of the experts)."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help="Compute dtype of both sides: float32, or bfloat16, whose rounding may hide differences."),
    ] = "float32",
    layer_by_layer: Annotated[
        bool,
        typer.Option(
            "--layer-by-layer", help="Compare layer by layer, with one layer of plain transformers in memory at a time."
        ),
    ] = False,
    revision: Revision = None,
    out: Annotated[Path, typer.Option("--out", help="Report file for a bug report, .md or .json.")] = Path(
        "moetool-verify.md"
    ),
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Compare a model served by moetool with plain transformers: tokens, logits, chosen experts, weights.

    Exit code 0 means that every answer is exact or a tie. In bfloat16 some answers differ by rounding alone, as between
    two of transformers' own implementations.
    """
    from moetool.measuring.verification import VerifyOptions
    from moetool.measuring.verification import verify as run
    from moetool.measuring.verification_report import COLUMNS, report_on, require_report_file
    from moetool.models.checkpoint import Checkpoint
    from moetool.models.files.hub import with_revision
    from moetool.models.loading import available_device

    require_report_file(out, overwrite)
    options = VerifyOptions(
        policies=tuple(listed(policy)) if policy else (),
        prompts=prompts,
        tokens=tokens,
        device=device or available_device(),
        dtype=dtype,
        device_memory_bytes=memory_bytes("--device-memory", device_memory),
        layer_by_layer=layer_by_layer,
    )
    with Checkpoint.open(with_revision(model, revision)) as checkpoint:
        with tables.stages() as on_progress:
            made = run(checkpoint, options, on_progress)
        report = report_on(checkpoint, made, options.device)
    report.save(out)
    if as_json:
        tables.print_json(report.to_json())
    else:
        tables.print_lines([(name, "", value) for name, value in report.facts()])
        tables.print_table("answers by policy", COLUMNS, report.rows())
        for line in report.skipped:
            tables.print_paragraph(f"not compared: {line}")
        for problem in made.problems[:20]:
            tables.print_paragraph(f"- {problem}")
        tables.print_paragraph(report.verdict_line)
        print(f"{out}: {report.hint or 'the report'}")
    if made.verdict == "differs":
        raise typer.Exit(1)
