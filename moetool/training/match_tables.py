"""The tables of `moetool evaluate`: headings, columns and cells."""

import math
from collections.abc import Sequence
from typing import Any

from moetool.base.tables import TextTable, count, numbered, percent, print_paragraph, print_table, significant

_MOST_LAYERS = 12
_AHEAD = (1, 3, 6)  # distances of the overview


def print_evaluations(rows: Sequence[Any]) -> None:
    """Print a comparison of predictors: the best ones, an overview, then by task, the unseen one last."""
    for line in verdicts(rows):
        print_paragraph(line)
    print()
    for table in (overview(rows), *(table for group in by_task(rows) for table in tables_of(group))):
        print_matches(table)


def verdicts(rows: Sequence[Any]) -> list[str]:
    """The best predictor one layer ahead for each scope and phase, beside the best baseline."""
    found = []
    for group in by_task(rows):
        where = "on the unseen task" if group[0].unseen_task else "on held-out requests"
        for phase in phases(group):
            matched = [(match, row) for row in group if (match := _at(row, phase, _AHEAD[0])) is not None]
            trained = [pair for pair in matched if pair[1].baseline is None]
            others = [pair for pair in matched if pair[1].baseline is not None]
            if not trained:
                continue
            best, row = max(trained, key=lambda pair: pair[0])
            share, beside = percent(best, ".0f"), ""
            if others:
                least, baseline = max(others, key=lambda pair: pair[0])
                worth = "more than" if best > least else "no more than"
                beside = f", {worth} the baseline {baseline.predictor} ({percent(least, '.0f')})"
            what = {"prefill": "prompts", "decode": "new tokens"}[phase]
            found.append(f"{what} {where}: {row.predictor} predicts most of the next layer's experts ({share}){beside}")
    return found


def print_matches(table: TextTable) -> None:
    """Print one of these tables with its title and notes."""
    print_paragraph(table.title)
    print_table("", table.columns, table.rows)
    for note in table.notes:
        print_paragraph(f"  {note}")
    if table.notes:
        print()


def overview(rows: Sequence[Any]) -> TextTable:
    """Return the overview: shares in whole per cent, at several distances."""
    groups = {group[0].unseen_task: group for group in by_task(rows)}
    found = {(g, row.predictor, row.path, row.baseline is None): row for g, group in groups.items() for row in group}
    lines = list(dict.fromkeys(key[1:] for key in found))
    there = [(unseen, phase) for unseen, group in groups.items() for phase in phases(group)]
    named = {"prefill": "prompts", "decode": "new tokens"}
    profiled = any(row.decode_step_ms is not None for row in rows)
    widest = max((len(row.scores[0].recall) for row in rows), default=0)
    table = []
    for line in lines:
        mine = {unseen: found.get((unseen, *line)) for unseen in groups}
        row = next(row for row in mine.values() if row is not None)
        first, fitted = row.scores[0], row.training_s
        shares = [first.exact, first.at_least_one, first.recall[-1] if first.recall else None]
        table.append(
            [
                row.predictor,
                *(" ".join(_whole(_at(mine[unseen], phase, d)) for d in _AHEAD) for unseen, phase in there),
                *map(_whole, shares),
                f"{100 * first.calibration_error:.1f}",
                *(_percent(row.expert_bytes_share), significant(row.step_ms, 3)),
                *([_percent(row.step_ms / row.decode_step_ms)] if profiled else []),
                *(significant(row.prompt_ms, 3), "-" if fitted is None else f"{fitted:,.0f}"),
            ]
        )
    scopes = "; ".join(scope(group) for group in groups.values())
    distances = ", ".join(map(str, _AHEAD[:-1]))
    return TextTable(
        title=f"Overview, shares in %; {scopes}",
        columns=(
            "predictor",
            *(f"unseen\n{named[phase]}" if unseen else named[phase] for unseen, phase in there),
            *("exact", "one", f"in {rows[0].top_k + widest}", "calib.", "of experts", "ms/step"),
            *(("of step",) if profiled else ()),
            *("ms/request", "train s"),
        ),
        rows=table,
        notes=(
            f"prompts, new tokens: match {distances} and {_AHEAD[-1]} layers ahead; other shares: one layer ahead",
            f"exact: all k right; one: at least one right; in {rows[0].top_k + widest}: share of the k among as many "
            "predicted; calib.: calibration error",
            "of experts: predictor's bytes / bytes of all experts; ms/step: for one token and all layers",
        ),
    )


def _at(row: Any, phase: str, distance: int) -> float | None:
    score = None if row is None else row.overall(phase).get(distance)
    return None if score is None else score.match


def _whole(value: float | None) -> str:
    """Format a share in per cent with two digits."""
    return " -" if value is None else f"{100 * value:2.0f}"


def by_task(rows: Sequence[Any]) -> list[list[Any]]:
    """Return the rows of the trace, then those of the unseen task, if any."""
    return [group for unseen in (False, True) if (group := [row for row in rows if row.unseen_task == unseen])]


def tables_of(rows: Sequence[Any]) -> list[TextTable]:
    made = [_right(rows), *(_by_distance(rows, phase) for phase in phases(rows)), _recall(rows), _by_layer(rows)]
    scored = [row.prompt_prediction for row in rows if row.prompt_prediction is not None]
    found = [phase for phase in ("prefill", "decode") if any(one.overall(phase) for one in scored)]
    made += [_prompt_predictions(rows, phase) for phase in found]
    return [*made, _costs(rows)]


def phases(rows: Sequence[Any]) -> list[str]:
    """Return the scored phases among prefill and decode."""
    return [phase for phase in ("prefill", "decode") if any(row.overall(phase) for row in rows)]


def scope(rows: Sequence[Any]) -> str:
    """Describe the scored requests."""
    first = rows[0]
    requests = numbered(first.num_requests, "request")
    where = {
        "test": f"{requests} held out",
        "end": f"the last tokens of {requests}",
        "all": f"{requests} of an unseen task" if first.unseen_task else f"{requests} not used in training",
    }[first.requests]
    others = f" ({first.num_skipped} left out)" if first.num_skipped and first.requests == "all" else ""
    doubt = f"; {first.undecided} may repeat training prompts, which were not recorded" if first.undecided else ""
    return f"{where}{others}, {first.num_tokens:,} tokens{doubt}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _of(score: Any, name: str) -> str:
    return _share(getattr(score, name)) if score else "-"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    if 0 < value < 0.00001:
        return "< 0.001 %"
    return percent(value, ",.0f" if value >= 1 else ".3g")


def _right(rows: Sequence[Any]) -> TextTable:
    shares = ("match", "exact", "at least one", "in 2k", "in prefill", "in decode")
    counted: dict[str, list[str]] = {}
    for row in rows:
        if row.baseline is not None:
            counted.setdefault(row.baseline, []).append(row.predictor)
    return TextTable(
        title=f"next layer's experts on {scope(rows)}",
        columns=("predictor", *shares[:4], "calib. error", *shares[4:]),
        rows=[
            [
                row.predictor,
                *(_of(row.scores[0], name) for name in ("match", "exact", "at_least_one")),
                _share(row.scores[0].recall[-1]) if row.scores[0].recall else "-",
                _of(row.scores[0], "calibration_error"),
                *(_of(row.overall(phase).get(1), "match") for phase in ("prefill", "decode")),
            ]
            for row in rows
        ],
        notes=tuple(f"{', '.join(names)} counted on {requests}" for requests, names in counted.items()),
    )


def _by_distance(rows: Sequence[Any], phase: str) -> TextTable:
    distances = sorted({distance for row in rows for distance in row.overall()})
    cells = [[_of(row.overall(phase).get(d), "match") for d in distances] for row in rows]
    title = f"match in {phase} by distance: layers ahead of the last computed layer"
    return _shares_table(title, rows, list(map(str, distances)), cells)


def _shares_table(title: str, rows: Sequence[Any], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> TextTable:
    lines = [[row.predictor, *mine] for row, mine in zip(rows, cells, strict=True)]
    return TextTable(title=title, columns=("predictor", *columns), rows=lines)


def _recall(rows: Sequence[Any]) -> TextTable:
    recall = [(row.scores[0].match, *row.scores[0].recall) for row in rows]
    top_k = rows[0].top_k
    amounts = [str(top_k + more) for more in range(max(map(len, recall)))]
    title = f"share of the next layer's {top_k} experts among the n most likely ones"
    return _shares_table(title, rows, amounts, [[_share(value) for value in values] for values in recall])


def _by_layer(rows: Sequence[Any]) -> TextTable:
    """Return the match by layer; neighbouring layers are averaged if there are many."""
    layers = [s.layer for s in rows[0].scores if s.phase == "all" and s.layer is not None and s.distance == 1]
    size = math.ceil(len(layers) / _MOST_LAYERS)
    groups = [layers[start : start + size] for start in range(0, len(layers), size)]
    names = [f"{group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups]

    def cells(row: Any) -> list[str]:
        match = {s.layer: s.match for s in row.scores if s.phase == "all" and s.distance == 1}
        return [_share(sum(match[layer] for layer in group) / len(group)) for group in groups]

    return _shares_table("match by MoE layer, predicted from the layer before", rows, names, list(map(cells, rows)))


def _prompt_predictions(rows: Sequence[Any], phase: str) -> TextTable:
    scored = [(row, row.prompt_prediction) for row in rows if row.prompt_prediction is not None]
    first = scored[0][1]
    prompts = phase == "prefill"
    title = "predictions for the prompts of" if prompts else "predictions for the new tokens of"
    shares = ("match", "exact", "at least one", "last quarter", *(("busiest",) if prompts else ()))
    return TextTable(
        title=f"{title} {first.num_requests} pending requests, all layers, "
        f"{first.prompt_tokens if prompts else first.new_tokens:,} tokens",
        columns=("predictor", *shares, "calib. error", "load error" if prompts else "load error, whole request"),
        rows=[
            [
                row.predictor,
                *(_of(f.overall(phase), name) for name in ("match", "exact", "at_least_one")),
                _share(f.deepest(phase)),
                *([_share(f.busiest)] if prompts else []),
                _of(f.overall(phase), "calibration_error"),
                _share(f.load_error if prompts else f.request_load_error),
            ]
            for row, f in scored
        ],
    )


def _costs(rows: Sequence[Any]) -> TextTable:
    profiled = any(row.decode_step_ms is not None for row in rows)
    of_a_step = ("of a step",) if profiled else ()
    table = []
    for row in rows:
        step = [_percent(row.step_ms / row.decode_step_ms)] if profiled else []
        request = [_percent(row.prompt_ms / row.decode_step_ms)] if profiled else []
        trained = ["counted" if row.baseline or row.epochs is None else f"{row.epochs}"]
        trained.append("-" if row.training_s is None else f"{row.training_s:,.{0 if row.training_s >= 10 else 1}f}")
        trained.append("-" if row.training_tokens is None else count(row.training_tokens))
        table.append(
            [
                *(row.predictor, count(row.parameters), count(row.size_bytes, "B"), _percent(row.expert_bytes_share)),
                *(significant(row.step_ms, 3), *step, significant(row.prompt_ms, 3), *request),
                *(*trained, _percent(row.training_share)),
            ]
        )
    steps = sorted({row.decode_step_ms for row in rows if row.decode_step_ms is not None})
    note = (
        f"a decode step takes {significant(steps[0], 3)} ms with every expert in memory, by the profile"
        if steps
        else ""
    )
    return TextTable(
        title=f"cost; pending requests have {rows[0].prompt_tokens:,.0f} tokens",
        columns=(
            *("predictor", "parameters", "size", "of experts", "ms / step", *of_a_step),
            *("ms / request", *of_a_step, "epochs", "seconds", "on tokens", "of trace"),
        ),
        rows=table,
        notes=(note,) if note else (),
    )
