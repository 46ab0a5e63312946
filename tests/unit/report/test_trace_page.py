"""The page of a report: complete, self-contained, reproducible."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from moetool.base.errors import CapacityError, UsageError
from moetool.report.atlas import draw_atlas
from moetool.report.sample import ReportOptions
from moetool.report.trace_measures import TraceMeasures, measure
from moetool.report.trace_page import facts, render
from moetool.trace.reader import Trace
from moetool.tuning.advice import advise
from moetool.tuning.replay import replay
from tests import synthetic, synthetic_routes, traces
from tests.refusals import refused

LENGTHS = [(5, 4), (3, 6), (4, 1), (6, 3)]
VOID = {"meta", "br", "link", "img", "input", "hr"}


SECTIONS = ("Popularity", "Tasks", "Load skew", "Entropy", "Affinity", "Reuse", "Hit rates")


class Page(HTMLParser):
    """Checks that elements nest, and collects what a page holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("src", "href", "xlink:href", "action", "data") if name in values]
        if tag == "svg":
            assert values["role"] == "img"
            self.labels.append(values["aria-label"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TraceMeasures:
    """Four tasks and layers of several sizes, with logits."""
    folder = tmp_path_factory.mktemp("report") / "trace"
    return measure(traces.write(folder, traces.alone(LENGTHS), LENGTHS), budgets=("25%", "50%"))


def drawn(made: TraceMeasures) -> str:
    trace = Trace(Path(made.info["path"]))
    return render(made, advise(trace), draw_atlas(trace, made.routes))


@pytest.fixture(scope="module")
def text(made: TraceMeasures) -> str:
    return drawn(made)


def test_the_page_has_every_section_and_is_self_contained(text: str) -> None:
    page = Page(text)
    assert page.headings == ["Advice", *SECTIONS, "Experts"]
    assert len(page.ids) == len(set(page.ids))
    anchors = {link for link in page.links if link.startswith("#")}
    assert anchors <= {f"#{name}" for name in page.ids}
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert set(re.findall(r"https?://[^\"' <]*", text)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert "@import" not in text and "@font-face" not in text
    assert page.tags.count("figure") == page.tags.count("svg") == page.tags.count("figcaption") == len(page.labels)
    assert all(len(label) > 20 and "nan" not in label for label in page.labels)
    assert "break-inside: avoid" in text
    assert len(text) < 1_000_000


def test_the_same_trace_gives_the_same_numbers(made: TraceMeasures) -> None:
    again = measure(Trace(Path(made.info["path"])), budgets=("25%", "50%"))
    assert json.dumps(again.to_json()) == json.dumps(made.to_json())


def test_hit_rates_equal_replays(made: TraceMeasures) -> None:
    trace = Trace(Path(made.info["path"]))
    assert len(made.replayed) == len(LENGTHS)
    rows = replay(trace, ["lru", "lfu", "belady"], [made.whole_bytes // 4, made.whole_bytes // 2])
    assert [row.to_json() for row in made.rows] == [row.to_json() for row in rows]


def test_measures_are_valid_json(made: TraceMeasures) -> None:
    numbers = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert numbers["tasks"] == ["t0", "t1", "t2", "t3"]
    assert np.array(numbers["popularity"]["tokens_QLE"]).sum() == made.info["tokens"] * sum(traces.SPEC.top_k_L)
    assert numbers["replay"][-1]["policy"] == "belady"
    assert set(numbers["affinity"]["lift_EE"]) == {"1", "2"}  # absolute ids of the layers before the last
    assert numbers["reuse"]["lru_hit_rate"][0] == {"slots": 0, "hit_rate": 0}


def test_a_trace_with_one_layer_and_task_has_a_page(tmp_path: Path) -> None:
    trace = synthetic.write_trace(tmp_path / "t", synthetic.make_spec(layers=1), num_requests=2, new_tokens=0)
    made = measure(trace)
    page = drawn(made)
    assert drawn(measure(trace)) == page  # the same, to the byte
    assert "The trace has one task" in page and "has no logits" in page and "one MoE layer" in page
    assert "prompts only: each token counts as an iteration" in page
    assert "Few tokens" in page
    assert Page(page).headings == ["Advice", *SECTIONS, "Experts"]
    assert made.to_json()["router_entropy"] is None


def test_the_page_names_its_sample(tmp_path: Path) -> None:
    trace = Trace(synthetic_routes.write_trace(tmp_path / "t", num_requests=8, prompt_tokens=4, new_tokens=4))
    made = measure(trace, budgets=["50%"], options=ReportOptions(choices=200, uses=60))
    assert len(made.replayed) < len(made.routes.requests) < 8
    said = dict(facts(made))
    assert said["counted"].endswith("sampled from 8 requests with 64 tokens")
    assert "sampled from those, each task in turn" in said["replayed"]


def test_the_order_of_a_log_is_kept(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "t", traces.together(LENGTHS), LENGTHS, composition={"kind": "log"})
    made = measure(trace, budgets=["50%"])
    assert not made.sequential
    assert [row.digest for row in made.rows] == [
        row.digest for row in replay(trace, ["lru", "lfu", "belady"], [made.whole_bytes // 2])
    ]


def test_invalid_options_and_traces_are_refused(tmp_path: Path) -> None:
    spec = synthetic.make_spec(layers=2)
    trace = synthetic.write_trace(tmp_path / "t", spec)
    with refused(UsageError, "lfu"):
        measure(trace, policies=["lfv"])
    with pytest.raises(CapacityError):
        measure(trace, budgets=["1%"])
    with refused(UsageError, "uses", 0, 1):
        ReportOptions(uses=0)
    lone = synthetic.write_trace(tmp_path / "u", spec, num_requests=1, prompt_tokens=1, new_tokens=0)
    with refused(UsageError, "too few", "held-out"):
        measure(lone)
