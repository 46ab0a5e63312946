"""The command `moetool advise`."""

import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from moetool.base import assets, durable, tables
from moetool.base.config import parse_bytes, parse_seconds
from moetool.base.errors import MoetoolError, UsageError
from moetool.cli.flags import Json, Overwrite, listed, require_policies


def advise(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Trace or counts directory.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="HTML file for the advice, in addition to the output.")
    ] = None,
    memory: Annotated[
        list[str],
        typer.Option(help="Expert memory to compare, as shares of all experts (default: 6.25%,12.5%,25%,50%,75%)."),
    ] = [],
    policy: Annotated[
        list[str],
        typer.Option(
            help="Cache policies, comma-separated, or auto for all that need no predictor (default: lru,lfu,foresight)."
        ),
    ] = [],
    bandwidth: Annotated[
        list[str],
        typer.Option(
            help="Link that experts are loaded over: pcie3, pcie4, pcie5 (x16), nvme, sata, or bytes per second, "
            "e.g. 20GB (default: pcie4,nvme)."
        ),
    ] = [],
    compute: Annotated[
        str | None,
        typer.Option(help="Compute time per token, e.g. 20ms (default: time to read its experts at 1 TB/s)."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Maximum tokens to replay from each half of the trace.")] = 1000,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Recommend cache, prefetch and placement settings from a trace, with held-out evidence."""
    from moetool.report.advice_page import answers, memory_table, page, policy_table
    from moetool.trace.expert_counts import open_workload
    from moetool.tuning.advice import AdviceOptions
    from moetool.tuning.advice import advise as run

    if out is not None:
        durable.require_new_file(out, overwrite)
    names = tuple(listed(policy)) if policy else ()
    if names:
        require_policies([name for name in names if name != "auto"], {})
    plain = AdviceOptions()
    options = AdviceOptions(
        shares=tuple(_share(text) for text in listed(memory)) if memory else plain.shares,
        policies=names or plain.policies,
        bandwidths=dict(map(_bandwidth, listed(bandwidth))) if bandwidth else plain.bandwidths,
        compute_s=None if compute is None else parse_seconds(compute),
        tokens=tokens,
        ahead_tokens=min(tokens, plain.ahead_tokens),
    )
    source = open_workload(path)
    if compute is not None:
        source.spec.require_sizes(path)
    with tables.stages() as on_progress:
        advice = run(source, options, on_progress)
    if out is not None:
        durable.write_text(out, page(advice, str(path)))
    if as_json:
        tables.print_json({**advice.to_json(), "answers": [one.to_json() for one in answers(advice)]})
        return
    tables.print_paragraph(f"{path}: {advice.model}, {advice.shape}")
    replayed = f"; policies replayed on {advice.replayed_on} of these" if advice.replayed_on else ""
    tables.print_paragraph(f"chosen on {advice.chosen_on}; scored on {advice.scored_on}{replayed}")
    memory_table(advice).print()
    if (policies := policy_table(advice)) is not None:
        policies.print()
    for one in answers(advice):
        tables.print_paragraph(f"{one.question} {one.answer}")
        tables.print_paragraph(f"  {one.evidence}")
    for sentence in advice.unknown:
        tables.print_paragraph(sentence)
    for purpose, command in _next(source, shlex.quote(str(path)), advice):
        print(f"Next, {purpose}: moetool {command}")  # in one line, to copy


def _next(source: Any, path: str, advice: Any) -> Iterator[tuple[str, str]]:
    """Commands that follow from the advice, with their purposes; each runs as it is."""
    has_tokens = advice.replayed_on is not None
    yield "figures", f"report {path} --out page.html" if has_tokens else f"advise {path} --out page.html"
    if advice.replay_held_out and has_tokens and (model := _model_options(source)) is not None:
        yield "policy and slots of a device", f"plan cache --trace {path}{model} --out plan.json"
    elif has_tokens:
        yield "all policies at other sizes", f"replay --trace {path} --policy auto,belady --budget 10%,30%,60%"
    gigabytes = max(80, math.ceil(1.25 * source.spec.all_experts_bytes / 8e9))
    cluster = f"--cluster 8x{gigabytes}GB --planner eplb --for vllm"
    yield "experts on several GPUs", f"plan placement --trace {path} {cluster} --out placement.json"


def _model_options(source: Any) -> str | None:
    """Options of `plan cache` for the trace's model, which may be here or have a shape in the package; else None."""
    facts, name = source.manifest["provenance"], source.spec.name.rpartition("/")[2].lower()
    if "imported" in facts:
        model = str(facts["imported"].get("settings", {}).get("model", ""))
        if model == "reference" or (model and (Path(model) / "config.json").is_file() and _runs(model)):
            return f" --model {shlex.quote(model)} --config-only"
    elif facts.get("model") == "reference" or (facts.get("model") and Path(facts["model"]).exists()):
        return ""
    for shape in sorted(assets.path("recipes", "shapes").glob("*/config.json")):
        top_k = json.loads(shape.read_bytes())["num_experts_per_tok"]  # some routes keep fewer than the model's
        if name.startswith(shape.parent.name) and set(source.spec.top_k_L) == {top_k}:
            return f" --model {shape.parent.name} --config-only"
    return None


def _runs(model: str) -> bool:
    """Whether moetool runs models of this config; others may be traced."""
    from moetool.models.checkpoint import Checkpoint

    try:
        return bool(Checkpoint.open(model, weights=False).layers)
    except MoetoolError:
        return False


def _share(text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / 100 if text.strip().endswith("%") else float(number)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(f"--memory {text!r}: expected a share of all experts, such as 25%")
    return share


def _bandwidth(text: str) -> tuple[str, float]:
    from moetool.tuning.advice import BANDWIDTHS

    if text in BANDWIDTHS:
        return text, BANDWIDTHS[text]
    try:
        return text, float(parse_bytes(text.removesuffix("/s")))
    except UsageError:
        raise UsageError(f"--bandwidth {text!r}: expected {', '.join(BANDWIDTHS)}, or bytes/s such as 20GB") from None
