"""The page of `moetool evaluate --report`: its tables, with bars and small charts, in one HTML file without scripts."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moetool import __version__, durable
from moetool.evaluation.match_tables import MEANINGS, MatchTable, by_task, overview, phases, scope, tables_of

_COLOURS = ("#0b62a4", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d", "#0e7490", "#4b5563")
_DASHES = ("none", "6 3", "2 3")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 440, 250, 40, 34, 10
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1000px; margin: 2em auto;
  padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid #999 }
figure, section { margin: 1.2em 0; break-inside: avoid } figcaption, h3 { font-weight: 600; font-size: 1em; margin: 0;
  padding-bottom: .3em }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9em }
th, td { padding: .15em .6em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th { border-bottom: 1px solid #666; font-weight: 600 } th:first-child, td:first-child { text-align: left }
.note, dd { color: #444 } dt { font-weight: 600 } dd { margin: 0 0 .4em 1.5em }
.charts { display: flex; flex-wrap: wrap; gap: 1em } svg { max-width: 100%; height: auto }
@media print { body { margin: 0; font-size: 11px } .wide { overflow: visible } * { print-color-adjust: exact } }
"""


def write_page(path: Path, rows: Sequence[Any]) -> None:
    """Write the page of some evaluations (`moetool.evaluation.evaluate.Evaluation`), whole or not at all."""
    durable.write_text(path, page(rows))


def page(rows: Sequence[Any]) -> str:
    """The page, which needs nothing but itself."""
    names = list(dict.fromkeys(row.predictor for row in rows))
    body = [
        "<h1>Predictors of coming experts</h1>",
        f"<p>{_text(', '.join(names))}, scored by moetool {__version__} on what they were not made from.</p>",
    ]
    body.append(_table(overview(rows)))
    for group in by_task(rows):
        body.append(f"<h2>{'A task not trained on' if group[0].unseen_task else 'The task trained on'}</h2>")
        body.append(f"<p>{_text(group[0].trace)}: {_text(scope(group))}.</p>")
        charts = [_chart(group, phase) for phase in phases(group)]
        body.append(f'<div class="charts">{"".join(charts)}</div>')
        body += [_table(table) for table in tables_of(group)]
        body.append(_everything(group))
    meanings = "".join(f"<dt>{_text(name)}</dt><dd>{_text(words)}</dd>" for name, words in MEANINGS.items())
    body.append(f"<h2>What the measures mean</h2><dl>{meanings}</dl>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Predictors of coming experts</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(table: MatchTable) -> str:
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in table.columns)
    lines = []
    for row in table.rows:
        cells = "".join(
            f"<td{_bar(cell) if column in table.shares else ''}>{_text(cell)}</td>"
            for column, cell in zip(table.columns, row, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in table.notes)
    return (
        f'<section><h3>{_text(table.title)}</h3><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{notes}</section>"
    )


def _bar(cell: str) -> str:
    """A bar behind a share, as an attribute."""
    try:
        percent = 100 * float(cell)
    except ValueError:
        return ""
    return f' style="background:linear-gradient(90deg,#cfe3f5 {percent:.1f}%,transparent {percent:.1f}%)"'


def _everything(rows: Sequence[Any]) -> str:
    """All measures by distance and phase, folded away."""
    widest = max(len(row.scores[0].recall) for row in rows)
    top_k = rows[0].top_k
    columns = ["predictor", "phase", "distance", "match", "exact", "at least one"]
    columns += [f"in {top_k + more}" for more in range(1, widest + 1)] + ["calib. error"]
    lines = []
    for row in rows:
        for phase in ("prefill", "decode"):
            for distance, s in sorted(row.overall(phase).items()):
                numbers = (s.match, s.exact, s.at_least_one, *s.recall, s.calibration_error)
                lines.append([row.predictor, phase, str(distance), *(f"{number:.3f}" for number in numbers)])
    made = _table(MatchTable(title="every measure by phase and distance", columns=tuple(columns), rows=lines))
    return f"<details><summary>Every measure by phase and distance</summary>{made}</details>"


def _chart(rows: Sequence[Any], phase: str) -> str:
    """Match by distance, a line for each predictor, named beside the chart."""
    distances = sorted({distance for row in rows for distance in row.overall(phase)})
    across, up = _WIDTH - _LEFT - 10, _HEIGHT - _TOP - _BOTTOM
    x = {d: _LEFT + across * (d - distances[0]) / max(1, distances[-1] - distances[0]) for d in distances}

    def y(share: float) -> float:
        return _TOP + up * (1 - share)

    parts = []
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    parts += [f'<text x="{x[d]:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{d}</text>' for d in distances]
    parts.append(f'<text x="{_LEFT + across / 2:.0f}" y="{_HEIGHT - 3}" text-anchor="middle">distance (layers)</text>')
    legend, said = [], []
    for i, row in enumerate(row for row in rows if row.overall(phase)):
        colour, dash = _COLOURS[i % len(_COLOURS)], _DASHES[i // len(_COLOURS) % len(_DASHES)]
        points = [(x[d], y(s.match)) for d, s in sorted(row.overall(phase).items())]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        stroke = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{line}" fill="none" {stroke}/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"/>' for px, py in points]
        mark = f'<svg width="26" height="10" aria-hidden="true"><line x1="0" x2="26" y1="5" y2="5" {stroke}/></svg>'
        legend.append(f"{mark} {_text(row.predictor)}")
        said.append(f"{row.predictor} {row.overall(phase)[min(row.overall(phase))].match:.2f}")
    label = f"match in {phase} by distance; at the nearest: {', '.join(said)}"
    return (
        f"<figure><figcaption>match in {phase} by distance</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{_text(label)}" font-size="12" fill="#333">{"".join(parts)}</svg>'
        f'<p class="note">{"<br>".join(legend)}</p></figure>'
    )
