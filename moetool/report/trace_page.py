"""The page of a trace: one self-contained HTML file, for screen and print."""

from collections.abc import Callable

import numpy as np

from moetool.base import tables
from moetool.base.tables import TextTable
from moetool.base.types import ModelSpec
from moetool.report.advice_page import section
from moetool.report.atlas import Atlas, atlas_section
from moetool.report.figures import plots
from moetool.report.html_page import Section, render_page
from moetool.report.trace_measures import TraceMeasures
from moetool.trace.dataset_card import span_of
from moetool.tuning.advice import Advice
from moetool.tuning.replay_table import replay_table

_FEW_USES = 20


def render(made: TraceMeasures, advice: Advice, atlas: Atlas) -> str:
    """Return the page as HTML. Equal measures give equal pages: it holds no date."""
    notes, replayed = _notes(made), "Replayed policies, as by moetool replay"
    made_tables = {
        "Tasks": [_task_table(made)],
        "Hit rates": [replay_table(replayed, made.rows, (), made.whole_bytes, made.routes.spec.sized)],
    }
    return render_page(
        title=f"Routing of {made.routes.spec.name}",
        heading=f"Routing statistics of {made.routes.spec.name}",
        shape=shape_of(made.routes.spec),
        facts=facts(made),
        lead=section(advice),
        caveat=caveat(made),
        sections=[
            Section(name=name, notes=notes.get(name, []), plots=drawn, tables=made_tables.get(name, []))
            for name, drawn in plots(made).items()
        ]
        + [atlas_section(atlas)],
    )


def caveat(made: TraceMeasures) -> str | None:
    """Return a warning if the trace has too few tokens."""
    tokens, spec = len(made.routes.experts_TS), made.routes.spec
    uses = min(tokens * top_k / num for top_k, num in zip(spec.top_k_L, spec.num_experts_L, strict=True))
    if uses >= _FEW_USES:
        return None
    return (
        f"Few tokens: an expert was chosen {uses:.1f} times on average; below {_FEW_USES} times the numbers say "
        f"little about other requests. Capture more first."
    )


def shape_of(spec: ModelSpec) -> str:
    """Describe a model's MoE layers."""
    num_experts = span_of(spec.num_experts_L)
    return f"{spec.num_layers} MoE layers of {num_experts} experts, of which a token uses {span_of(spec.top_k_L)}"


def facts(made: TraceMeasures) -> list[tuple[str, str]]:
    """Return the sources of the page as terms and texts."""
    info, routes = made.info, made.routes
    recorded = [
        c for c in info["columns"] if c in ("experts", "weights", "logits", "hidden", "ahead", "resident", "embeddings")
    ]
    tokens, requests = len(routes.experts_TS), len(routes.requests)
    counted = f"{requests:,} requests with {tokens:,} tokens"
    if tokens < info["tokens"]:
        counted += f", sampled from {info['requests']:,} requests with {info['tokens']:,} tokens"
    else:
        counted += ": all"
    replayed = f"{len(made.replayed):,} requests with {made.replayed_tokens:,} tokens"
    if len(made.replayed) < requests:
        replayed += ", sampled from those, each task in turn"
    replayed += ", one after the other" if made.sequential else ", in the batches in which they were served"
    known = [
        ("trace", info["path"]),
        ("sha256", info["sha256"]),
        ("recorded", ", ".join(recorded) + ("" if "logits" in recorded else " (no scores over all experts)")),
        ("counted", counted),
        ("replayed", f"{replayed} (reuse and hit rates)"),
        ("tasks", f"{len(routes.tasks)}"),
    ]
    if not routes.stepwise:
        known.append(("phases", "prompts only: each token counts as an iteration"))
    known += [("note", note) for note in info["provenance"].get("imported", {}).get("notes", [])]
    return known


def _notes(made: TraceMeasures) -> dict[str, list[str]]:
    notes: dict[str, list[str]] = {}
    if len(made.routes.tasks) < 2:
        notes["Tasks"] = ["The trace has one task; with several, this section compares the experts that they use."]
    if made.router is None:
        notes["Entropy"] = [
            "The trace has no logits, so entropy is that of the chosen experts; capture with --keep topk,logits to "
            "see the entropy of the routers."
        ]
    if not made.lifts:
        notes["Affinity"] = ["The model has one MoE layer, so none follows another."]
    return notes


def _task_table(made: TraceMeasures) -> TextTable:
    routes, found, spread = made.routes, made.popularity, made.spread
    tokens_B = np.diff(routes.start_B)
    columns: dict[str, Callable[[int], str]] = {
        "task": lambda task: routes.tasks[task],
        "requests": lambda task: f"{(routes.task_B == task).sum():,}",
        "tokens": lambda task: f"{tokens_B[routes.task_B == task].sum():,}",
        "max / mean": lambda task: f"{found.uneven_QL[task].mean():.2f}",
        "Gini": lambda task: f"{found.gini_QL[task].mean():.2f}",
        "entropy of the task, bits": lambda task: f"{spread.task_QL[task].mean():.2f}",
        "of a request": lambda task: f"{spread.request_QL[task].mean():.2f}".replace("nan", "-"),
    }
    return tables.table_of("Tasks, means over the layers", range(len(routes.tasks)), columns)
