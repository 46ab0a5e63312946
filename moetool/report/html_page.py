"""Pages: sections of figures and tables, in one self-contained HTML file."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from moetool.base.tables import TextTable, unbroken
from moetool.report.figures.plot import Plot


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page with its own heading."""

    name: str
    notes: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[TextTable] = ()

    @property
    def id(self) -> str:
        return self.name.lower().replace(" ", "-")


def render_page(
    *, title: str, heading: str, shape: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section], **more: Any
) -> str:
    """Return the page as HTML: a heading, facts as terms and texts, then the nonempty sections.

    Args:
        more: `lead`, a first section, and a `caveat` above it.
    """
    from jinja2 import Environment

    template = resources.files("moetool.report").joinpath("page.html").read_text(encoding="utf-8")
    shown = [section for section in sections if section.notes or section.plots or section.tables]
    return (
        Environment(autoescape=True, finalize=_whole_units)
        .from_string(template)
        .render(title=title, heading=heading, shape=shape, facts=facts, sections=shown, **more)
    )


def _whole_units(value: Any) -> Any:
    """Keep numbers and units of plain text in one line; markup stays as it is."""
    return unbroken(value) if type(value) is str else value
