"""The commands that inspect machine, models and data: `moetool profile`, `doctor`, `models` and `data`."""

import contextlib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moetool.base import durable, tables
from moetool.base.config import MOST_THREADS
from moetool.base.errors import UsageError
from moetool.cli.flags import Json, Overwrite, Revision, note
from moetool.models.files.hub import with_revision


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="'reference', a Hugging Face directory or a hub name; with --config-only also a shape "
            "(deepseek-v2-lite, qwen3-30b-a3b) or a config.json.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file to write the profile to (default: print only).")
    ] = None,
    config_only: Annotated[
        bool,
        typer.Option(
            "--config-only",
            help="Use random weights of the config's shape; MODEL is a directory, config.json, shape or hub name.",
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Device to time: cpu or cuda (default: cpu, and cuda if present).")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Compute dtype: float32, bfloat16 or float16 (default: the checkpoint's).")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds to measure after one full pass.")] = 120.0,
    threads: Annotated[int, typer.Option(min=0, max=MOST_THREADS, help="Compute threads (0: automatic).")] = 0,
    predictor: Annotated[Path | None, typer.Option(help="Directory of a trained predictor to time.")] = None,
    peer: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a 'moetool profile --listen' peer; measures the network link to it."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Listen as a peer on PORT or HOST:PORT. No authentication: use only on trusted networks."),
    ] = None,
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Measure a model's costs on this machine: experts, attention, disk loads, device link."""
    if listen is not None:
        from moetool.measuring.probes.link import serve

        with contextlib.suppress(KeyboardInterrupt):
            serve(listen, on_ready=lambda address: tables.narrate(f"moetool: listening on {address}; Ctrl-C stops"))
        return
    if model is None:
        raise UsageError("no model given: moetool profile MODEL --out profile.json")
    model = with_revision(model, revision)
    from moetool.measuring.profile import ProfileOptions
    from moetool.measuring.profile import profile as run

    if out is not None:
        durable.require_new_file(out, overwrite)
    with tables.progress(f"profiling {model}", 100) as on_progress:
        made = run(
            model,
            ProfileOptions(
                config_only=config_only,
                device=device,
                dtype=dtype,
                seconds=seconds,
                threads=threads,
                predictor=predictor,
                peer=peer,
                scratch=Path() if out is None else out.parent,
            ),
            on_progress,
            note,
        )
    if out is not None:
        made.save(out)
    if as_json:
        tables.print_json(made.to_json())
    else:
        _print_profile(made)
        if out is not None:
            print(f"{out}: for --profile of replay, plan, simulate and evaluate")


def doctor(
    cluster: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a Ray head: check the connection, token and versions instead (at most 12 s)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine: GPUs, memory, speed of the current disk, libraries; or its connection to a cluster."""
    if cluster is not None:
        _doctor_cluster(cluster, as_json)
        return
    from moetool.measuring.doctor import doctor as run

    with tables.progress("measuring this machine"):
        findings = run()
    if as_json:
        tables.print_json([finding.to_json() for finding in findings])
    else:
        tables.print_lines([(finding.name, finding.value, finding.meaning) for finding in findings])


def _doctor_cluster(address: str, as_json: bool) -> None:
    from moetool.cluster.launch import parse_where
    from moetool.cluster.ray_check import check_cluster
    from moetool.cluster.ray_launch import require_ray

    if parse_where(address).address is None:
        raise UsageError(f"--cluster {address} names this machine alone; expected HOST:PORT of a Ray head")
    require_ray()
    checks = check_cluster(address)
    if as_json:
        tables.print_json([check.to_json() for check in checks])
    else:
        words = {True: "ok", False: "wrong", None: "?"}
        tables.print_lines([(f"{check.name}: {words[check.good]}", check.value, check.meaning) for check in checks])
    if any(check.good is False for check in checks):
        raise typer.Exit(1)


def models(as_json: Json = False) -> None:
    """List supported model families and weight formats, and what works with each."""
    from moetool.base.families import FAMILIES, unlisted
    from moetool.models.tested_formats import FORMATS, UNLISTED, format_table

    families = [*FAMILIES.values(), *map(unlisted, UNLISTED)]
    tested = format_table()
    words = {True: "tested", False: "not tested"}
    rows = []
    for family in families:
        formats = {format: words[done] for format, done in tested[family.name].items()}
        rows.append({**family.to_json(), "formats": formats})
    if as_json:
        tables.print_json(rows)
        return
    columns = ["family", "captured", "served", "decoded", "smoe", "weights"]
    yes = {True: "yes", False: "no"}
    table = []
    for r in [row for row in rows if row["known"] == "listed"]:
        served = [yes[r["captured"]], yes[r["served"] != "no"], r["decoded"], yes[r["substitution"]]]
        table.append([r["family"], *served, _short(r["weights"])])
    tables.print_table(f"{len(table)} families of Mixture-of-Experts models", columns, table, num_text=len(columns))
    tables.print_paragraph(
        "captured, served: moetool capture, moetool serve; smoe: the policy that substitutes experts"
    )
    tables.print_paragraph("decoded: how decode steps run on a CPU in bfloat16 (moetool guide speed)")
    tables.print_paragraph(
        "weights: score function of the router; sum 1: divided by the sum over the top-k experts (*: if the config "
        "sets norm_topk_prob)"
    )
    for row in rows:
        if row["known"] == "listed" and row["remarks"]:
            print(textwrap.fill(f"{row['family']}: {row['remarks']}", 78, subsequent_indent="  "))
    tables.print_paragraph("inferred from the model's router when it is opened:")
    tables.print_paragraph(f"{', '.join(UNLISTED)}, and others that transformers calls through its experts interface")
    cells = [[r["family"], ", ".join(name for name in FORMATS if r["formats"][name] == "tested")] for r in rows]
    plain = FORMATS[0]
    title = "weight formats tested with each family (others are read too)"
    tables.print_table(title, ["family", "tested"], [cell for cell in cells if cell[1] not in ("", plain)], num_text=2)
    others = ", ".join(name for name, found in cells if found == plain)
    tables.print_paragraph(f"tested with {plain} weights (float32, bfloat16, float16) only: {others}")


def _short(weights: str) -> str:
    """Shorten `weights` of a family so that a table of all families has one line for each on 80 columns."""
    return weights.replace("summing to one if norm_topk_prob", "sum 1 *").replace("summing to one", "sum 1")


def data(as_json: Json = False) -> None:
    """List prompt sets for --data: embedded ones, and public ones on the Hugging Face hub."""
    from moetool.prompts.gather import describe

    rows = describe()
    if as_json:
        tables.print_json(rows)
    else:
        _print_prompt_sets(rows)


def _print_profile(profile: Any) -> None:
    """Print the curves of a `moetool.costing.costs.CostProfile`, and the resulting time of one token."""
    spec, machine = profile.spec, profile.machine
    origin = "its config" if profile.config_only else "its files"
    threads = profile.compute[0].threads
    tables.print_paragraph(
        f"{spec.name}, by {origin}, on {machine.cpu}: {machine.cores} cores, load {profile.load_average:.1f}, "
        f"compute on {tables.numbered(threads, 'thread')}"
    )
    slots = ", ".join(f"{tables.count(c.slot_bytes, 'B')} in a slot ({c.device} {c.dtype})" for c in profile.compute)
    tables.print_paragraph(f"an expert takes {tables.count(spec.slot_bytes, 'B')} stored, {slots}")
    by_tokens, by_context, by_bytes = [], [], []
    for costs in profile.compute:
        where = f"{costs.device} {costs.dtype}"
        parts = ("expert", "gate", "shared", "dense", "head", "prompt_attention")
        by_tokens += [(f"{part.replace('_', ' ')}, {where}", getattr(costs, part)) for part in parts]
        by_context.append((f"attention, {where}", costs.attention))
    if profile.predictor is not None:
        by_tokens.append(("prediction", profile.predictor))
    for costs in profile.loads:
        cached = "" if costs.direct else " (through the page cache)"
        by_bytes.append((f"{costs.tier}, {costs.threads} at a time{cached}", costs.seconds))
    if profile.link is not None:
        by_bytes.append((f"link to {profile.peer}", profile.link))
    _print_curves("milliseconds by tokens", by_tokens, (1, 8, 64, 512))
    _print_curves("milliseconds of one token by context", by_context, (16, 128, 512, 2048))
    sizes = sorted({spec.slot_bytes // share for share in (16, 4, 1)})
    _print_curves("milliseconds by bytes", by_bytes, sizes, "B")
    for device in dict.fromkeys(costs.device for costs in profile.compute):
        best, step_s = profile.on(device), profile.decode_s(512, device)
        loads = min(profile.loads, key=lambda costs: costs.seconds(spec.slot_bytes))
        added = profile.load_all_s(loads.tier, loads.threads)
        rate = spec.slot_bytes / loads.seconds(spec.slot_bytes)
        tables.print_paragraph(
            f"one token on {device} in {best.dtype} at context 512 takes {tables.milliseconds(step_s)} ms "
            f"with every expert in memory; loading its {sum(spec.top_k_L)} experts from {loads.tier}, {loads.threads} "
            f"at a time ({tables.count(rate, 'B')}/s), takes {tables.milliseconds(added)} ms more"
        )


def _print_curves(title: str, curves: Sequence[tuple[str, Any]], amounts: Sequence[int], unit: str = "") -> None:
    """Print curves at some amounts, with the fit's error and the timings' noise; `*` marks extrapolation."""
    rows = [
        [
            name,
            *(f"{tables.milliseconds(curve(amount))}{'*' if amount > curve.x[-1] else ''}" for amount in amounts),
            tables.percent(curve.residual),
            tables.percent(curve.noise, ".0f") if curve.samples > 1 else "-",
            str(curve.samples),
        ]
        for name, curve in curves
        if curve is not None
    ]
    headings = [tables.count(amount, unit) for amount in amounts]
    tables.print_table(f"{title} (*: extrapolated)", ["", *headings, "fit", "noise", "timings"], rows)


def _print_prompt_sets(rows: Sequence[dict[str, Any]]) -> None:
    """Print the named prompt sets from `moetool.prompts.gather.describe`."""
    public = [row for row in rows if row["hub"] is not None]
    print(f"{len(public)} public sets on the Hugging Face hub (--data-dir: a local copy)")
    tables.print_lines([(row["name"], row["hub"], _about_prompts(row)) for row in public])
    names = ", ".join(row["name"] for row in rows if row["hub"] is None)
    tables.print_paragraph(f"embedded sets: {names}; 'all' means all of these")


def _about_prompts(row: Mapping[str, Any]) -> str:
    """Describe tasks, split, access, answer length and licence of a public prompt set."""
    output = row["output"]
    new = f"{output} new tokens" if isinstance(output, int) else "new tokens as in its answers" if output else ""
    tasks = ", ".join(row["tasks"]) or row["config"]
    parts = (row["split"], tasks, "gated" if row["gated"] else "", new, f"licence: {row['licence']}")
    return "; ".join(part for part in parts if part)
