"""The commands `moetool bench policies` and `drafts`: loads of policies and of drafts, by replay."""

from pathlib import Path
from typing import Annotated

import typer

from moetool import tables
from moetool.cli.bench_results import command_line, hand_over, results_file
from moetool.cli.flags import Json, listed, open_trace, settable
from moetool.config import parse, parse_bytes, parse_settings


def policies(
    trace: Annotated[list[Path], typer.Option(help="Trace directory. Repeatable.")],
    budget: Annotated[
        list[str], typer.Option(help="Expert memory as shares of all experts, comma-separated or repeated.")
    ] = ["12.5%,25%,50%"],
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to replay from each trace, rounded to whole requests.")
    ] = 2000,
    warm: Annotated[
        str | None, typer.Option(help="Share of the tokens, the first ones, that warm pools and memories, e.g. 50%.")
    ] = None,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="Output directory for policies.json.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing policies.json.")] = False,
) -> None:
    """Replay every policy that needs no training, with Belady's bound."""
    from moetool.bench.policy_table import bench_policies, print_policies

    file = results_file(out, "policies.json", overwrite)
    whole = 10**9
    shares = [parse_bytes(text, whole) / whole for text in listed(budget)]
    with tables.progress("traces", len(trace)) as passed:
        known = parse_bytes(warm, whole) / whole if warm else 0.0
        made = bench_policies(trace, shares, tokens=tokens, warm=known, command=command_line(), on_trace=passed)
    hand_over(made, file, print_policies, as_json=as_json)


def drafts(
    trace: Annotated[list[Path], typer.Option(help="Trace directory. Repeatable.")],
    settings: Annotated[
        list[str], settable("Setting: policy, share, length, matched, accepted=[0.6,1], verify, compute.")
    ] = [],
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="Output directory for drafts.json.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing drafts.json.")] = False,
) -> None:
    """Estimate the expert loads that speculative decoding saves, by replaying traces."""
    from moetool.bench.draft_pricing import DraftOptions, price_drafts, print_drafts

    file = results_file(out, "drafts.json", overwrite)
    options = parse(DraftOptions, parse_settings(settings), "--set")
    made = price_drafts([open_trace(path) for path in trace], options, command_line())
    hand_over(made, file, print_drafts, as_json=as_json)
