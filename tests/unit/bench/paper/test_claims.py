"""Verdicts on claims of papers, their recipes, and queues with known waits."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moetool.base import plugins
from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, Phase
from moetool.bench.bench_result import Row, read_result
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.assumed_machine import AssumedMachine
from moetool.bench.paper.claims import Sizes, choose, names, parse_paper, read_paper
from moetool.bench.paper.experiments import remote_share
from moetool.bench.paper.paper_results import figures, tables
from moetool.bench.paper.paper_run import (
    PaperOptions,
    costs_of,
    decided_elsewhere,
    priced,
    run_paper,
    run_papers,
    with_links,
)
from moetool.bench.paper.queueing import mean_by_server, serve_in_turn
from moetool.bench.paper.verdict import SPREAD, Check, Verdict, ceilings, derive, interval, judge
from moetool.bench.paper.workbench import Workbench, code_files, parsed, requests_of
from moetool.costing.machines import read_named_model
from moetool.costing.pricing import ForwardCosts, Prices
from moetool.trace.reader import Trace
from moetool.training.predictor import build
from moetool.training.tokens import Tokens
from tests.refusals import refused
from tests.synthetic_routes import make_spec, write_trace

PRINTED = {
    "director": (11, ("I", "II")),
    "duoserve": (6, ("1", "2", "3")),
    "finemoe": (18, ("1",)),
    "prism": (8, ("I", "II")),
    "smoe": (18, ("I", "II", "III", "IV")),
}
"""Figures of each paper, numbered from 1, and its tables."""
PAPERS = ("director", "duoserve", "finemoe", "prism", "smoe")
RECIPE = """
[paper]
title = "A title"
reference = "Somebody"
[sizes]
seeds = 2
[quick]
seeds = 1
[[claim]]
id = "Table I"
says = "more is remote, more is waited for"
printed = "-"
experiment = "remote_share"
options = { remote = [0.0, 1.0] }
check = { order = ["0 % remote", "100 % remote"] }
"""


def _judge(
    check: Check, derived: dict[str, dict[str, tuple[str, ...]]] | None = None, **values: list[float]
) -> Verdict:
    return judge(check, ExperimentResult(values=values, what="latency", unit="s", on=""), derived or {})


def test_intervals_follow_students_t() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, half) == (3.0, pytest.approx(2.7764451 * 2.5**0.5 / 5**0.5))
    assert interval([7.0]) == (7.0, None)


def test_a_verdict_follows_from_values() -> None:
    check = Check(order=("ours", "theirs"))
    assert _judge(check, ours=[1.0, 1.1, 0.9], theirs=[2.0, 2.1, 1.9]).answer == "agrees"
    wrong = _judge(check, ours=[2.0, 2.1, 1.9], theirs=[1.0, 1.1, 0.9])
    assert (wrong.answer, wrong.why) == ("differs", "not ours < theirs")
    assert _judge(check, ours=[1.0, 2.0], theirs=[1.5, 1.9]).answer == "undecided"
    assert _judge(check, ours=[1.0, 1.0], theirs=[1.0, 1.0]).answer == "undecided"  # no effect
    near = _judge(check, ours=[1.0, 1.001, 0.999], theirs=[1.005, 1.006, 1.004])
    assert near.answer == "undecided"  # a difference of half a per cent is none, however many seeds there are
    assert near.why == "by less than 1 %: ours < theirs"
    wide = _judge(check, ours=[1.0, 1.0, 1.0], theirs=[0.9, 1.11, 1.0])  # 0.3 ± 26 %: more seeds may decide it
    assert wide.why == f"{SPREAD}: ours < theirs"
    assert _judge(check, ours=[1.0], theirs=[1.0]).why == "one run: ours < theirs"
    both = _judge(Check(lowest="ours"), ours=[1.0, 1.001, 0.999], theirs=[1.005, 1.006, 1.004], wide=[0.5, 1.0, 3.0])
    assert both.why == f"{SPREAD}: ours < wide; by less than 1 %: ours < theirs"
    alone = _judge(check, ours=[1.0], theirs=[2.0])
    assert (alone.answer, alone.why) == ("undecided", "one run: ours < theirs")
    # Paired: what varies from seed to seed in both alike hides nothing.
    assert _judge(check, ours=[1.0, 50.0, 9.0], theirs=[2.2, 51.2, 10.21]).answer == "agrees"


def test_bounds_and_extremes() -> None:
    values = {"a": [1.0, 1.1], "b": [3.0, 3.1], "c": [2.0, 2.1]}
    assert _judge(Check(lowest="a"), **values).answer == "agrees"
    assert _judge(Check(highest="c"), **values).why == "not b < c"
    assert _judge(Check(highest="c", among=("a", "c")), **values).answer == "agrees"
    gain = {"gain": {"less": ("b", "c")}, "x": {"times": ("b", "a")}, "gap": {"minus": ("b", "a")}}
    found = _judge(Check(at_least={"gain": 0.2}, at_most={"gain": 0.5}), gain, **values)
    assert found.answer == "agrees"
    assert [name for name, _, _ in found.shown] == ["gain", "x", "gap"]
    assert (found.unit["gain"], found.unit["x"], found.unit["gap"]) == ("%", "x", "s")
    assert _judge(Check(at_least={"gain": 0.6}), gain, **values).answer == "differs"
    for nothing in (0.0, 0.3):  # a share of nothing is no number, and no answer
        values = {"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [nothing, nothing]}
        assert _judge(Check(at_most={"gain": 1.0}), gain, **values).answer == "undecided"


def test_a_gain_of_less_than_the_least_effect_is_none() -> None:
    gain = {"gain": {"less": ("a", "b")}}
    more = {"more": {"minus": ("a", "b")}}
    tiny = {"a": [100.0, 100.2, 100.1], "b": [99.9, 100.0, 99.95]}
    assert _judge(Check(at_least={"gain": 0.0}), gain, **tiny).answer == "undecided"
    assert _judge(Check(at_least={"more": 0.0}), more, **tiny).answer == "undecided"
    large = {**tiny, "b": [90.0, 90.2, 90.1]}
    assert _judge(Check(at_least={"gain": 0.0}), gain, **large).answer == "agrees"
    assert _judge(Check(at_most={"more": 0.0}), more, **large).answer == "differs"
    assert _judge(Check(at_least={"gain": 0.05}), gain, **large).answer == "agrees"


def test_lowest_is_taken_per_seed() -> None:
    best = {"best": {"lowest": ("a", "b", "c")}, "less": {"less": ("best", "d")}}
    values = derive({"a": [4.0, 8.0], "b": [6.0, 5.0], "c": [9.0, 9.0], "d": [2.0, 5.0]}, best)
    assert (values["best"], values["less"]) == ([4.0, 5.0], [0.5, 0.0])
    with refused(UsageError, "1 values"):
        derive({"a": [1.0]}, {"x": {"lowest": ("a",)}})
    with refused(UsageError, "3 values"):
        derive({"a": [1.0]}, {"x": {"minus": ("a", "a", "a")}})


def test_verdicts_compare_sizes_too() -> None:
    values = {"a": [1.0, 1.1], "b": [3.0, 3.1]}
    found = ExperimentResult(values=values, what="latency", unit="s", on="")
    wanted = {"x": {"times": ("b", "a")}}
    check = Check(at_least={"x": 1.5})

    def size(*printed: float) -> str:
        return judge(check, found, wanted, size={"x": printed}).size

    assert size(2.5) == size(3.5) == "x as printed"  # 2.9 times: 1.9 more than 1
    assert size(6.0, 8.0) == "x smaller, by 2.6x" and size(2.0) == "x larger, by 1.9x"
    assert size(60.0) == "x smaller, by 31x"
    wide = ExperimentResult(values={"a": [1.0, 1.1], "b": [1.3, 1.0]}, what="latency", unit="s", on="")
    assert judge(check, wide, wanted, size={"x": (2.0,)}).size == "x none, printed 2"  # 1.1 ± 2.5 times
    assert judge(check, found, wanted).size == ""


def test_one_run_decides_exact_values() -> None:
    check = Check(order=("ours", "theirs"))
    values = {"ours": [1.0], "theirs": [2.0]}
    for exact, answer in ((False, "undecided"), (True, "agrees")):
        assert judge(check, ExperimentResult(values=values, what="-", unit="", on="", exact=exact), {}).answer == answer


def test_fewer_than_three_traces_decide_nothing() -> None:
    check = Check(order=("ours", "theirs"))
    values = {"ours": [1.0, 1.1, 0.9], "theirs": [2.0, 2.1, 1.9]}
    for traces, answer in ((0, "agrees"), (1, "undecided"), (2, "undecided"), (3, "agrees")):
        verdict = judge(check, ExperimentResult(values=values, what="-", unit="", on="", traces=traces), {})
        assert verdict.answer == answer
        assert (verdict.why == f"{traces} of 3 independent traces") == (answer == "undecided")


def test_bounds_decide_beyond_the_least_effect_and_only_what_can_be_tested() -> None:
    for value, expected in ((0.762, "differs"), (0.767, "undecided"), (0.772, "undecided"), (0.78, "agrees")):
        found = ExperimentResult(values={"a": [value - 1e-4, value, value + 1e-4]}, what="share", unit="%", on="")
        assert judge(Check(at_least={"a": 0.77}), found, {}).answer == expected
        ruled_out = judge(Check(at_least={"a": 0.77}), found, {}, ruled_out="another machine")
        assert (ruled_out.answer, ruled_out.why) == ("cannot be tested here", "another machine")


def test_counts_may_equal_a_bound() -> None:
    for counts, answer in (([1.0, 1.0, 1.0], "agrees"), ([2.0, 1.0, 1.0], "undecided"), ([0.0, 0.0, 0.0], "differs")):
        assert _judge(Check(at_least={"moves": 1.0}), moves=counts).answer == answer
    assert _judge(Check(at_least={"moves": 1.0}), moves=[1.001, 1.0, 1.0]).answer == "undecided"


def test_a_claim_that_could_not_fail_cannot_be_tested() -> None:
    """A bound of 8 % on the loss by wrong predictions needs more than 8 % to lose."""
    derived = {"slower": {"less": ("predicted", "true")}, "gained": {"less": ("offline", "true")}}
    check = Check(at_most={"slower": 0.08}, above={"gained": 0.08})
    true = [100.0, 101.0, 99.0]
    for offline, predicted, answer in (
        ([130.0, 131.0, 129.0], [102.0, 103.0, 101.0], "agrees"),
        ([130.0, 131.0, 129.0], [130.0, 131.0, 129.0], "differs"),
        ([105.0, 106.0, 104.0], [105.0, 106.0, 104.0], "cannot be tested here"),
        ([100.0, 160.0, 99.0], [102.0, 103.0, 101.0], "cannot be tested here"),
    ):
        verdict = _judge(check, derived, offline=offline, predicted=predicted, true=true)
        assert verdict.answer == answer
        assert ("gained is not above 0.08" in verdict.why) == (answer == "cannot be tested here")


def test_claims_above_the_ceiling_cannot_be_tested() -> None:
    values = {"a": [1.0, 1.1], "b": [1.05, 1.15]}
    found = ExperimentResult(values=values, what="latency", unit="s", on="")
    wanted = {"x": {"times": ("b", "a")}}
    for best, answer in (([1.0, 1.1], "cannot be tested here"), ([0.5, 0.8], "differs")):
        verdict = judge(Check(at_least={"x": 1.42}), replace(found, best={"a": best}), wanted)
        assert verdict.answer == answer
        assert answer == "differs" or "at most 1.05" in verdict.why
    hits = replace(found, values={"a": [0.8, 0.9], "b": [0.7, 0.8]}, best={"a": [1.0, 1.0]}, highest_best=True)
    more = {"x": {"times": ("a", "b")}}
    assert ceilings(Check(at_least={"x": 1.65}), hits, more) == {"x": pytest.approx(1 / 0.7)}
    assert ceilings(Check(at_most={"x": 1.65}), hits, more) == {}


def test_what_decides_a_claim_must_be_as_in_the_paper() -> None:
    """A ratio to whole layers needs the paper's experts per layer and token; bytes and seconds of a model its size."""
    claim = read_paper("duoserve").claim[0]
    over = replace(claim, derive={"x": {"times": ("layers", "ours")}}, check=Check(at_least={"x": 1.4}), needs=())
    model = read_named_model("mixtral-8x7b-int4")
    found = ExperimentResult(values={}, what="-", unit="s", on="", experts=(64, 6), whole_layers=("layers",))
    assert "64" in decided_elsewhere(over, found, model) and "8" in decided_elsewhere(over, found, model)
    assert decided_elsewhere(over, replace(found, experts=(16, 4)), model) == ""
    assert decided_elsewhere(over, replace(found, whole_layers=()), model) == ""
    assert decided_elsewhere(replace(over, check=Check(order=("ours", "layers"))), found, model) == ""
    shares = replace(over, needs=("top_k",), check=Check(lowest="ours"))
    assert decided_elsewhere(shares, replace(found, experts=(8, 2)), model) == ""
    assert "4 experts here and 2 in Mixtral" in decided_elsewhere(shares, replace(found, experts=(16, 4)), model)
    sized = replace(over, needs=("size",), check=Check(lowest="ours"))
    assert decided_elsewhere(sized, replace(found, expert_bytes=23_000_000_000), model) == ""
    assert "18.9 MB" in decided_elsewhere(sized, replace(found, expert_bytes=18_900_000), model)
    assert decided_elsewhere(sized, found, None) == ""


def test_predictors_of_one_class_are_replayed_separately(tmp_path: Path) -> None:
    trace = Trace(write_trace(tmp_path / "trace", make_spec(2), num_requests=4))
    bench = Workbench(sizes=Sizes(), machine=AssumedMachine(), work=tmp_path)
    requests = frozenset(requests_of(trace))
    made = []
    for seed in (0, 1):
        predictor = build("popularity", trace.spec)
        experts_TPK = torch.randint(0, 8, (50, 2, 2), generator=torch.Generator().manual_seed(seed))
        predictor.count(Tokens(experts_TPK=experts_TPK, request_T=torch.zeros(50, dtype=torch.int64)))
        made.append(predictor)
    assert repr(made[0]) == repr(made[1])
    rows = [bench.replayed(trace, "promoe", 6 * trace.spec.slot_bytes, requests, predictor=one) for one in made]
    assert rows[0].digest != rows[1].digest


def test_unmeasured_names_are_refused() -> None:
    with refused(UsageError, "prism"):
        _judge(Check(lowest="prsm"), prism=[1.0])
    with refused(UsageError, "empty", "check"):
        Check(order=("alone",))
    with refused(UsageError, "x"):
        derive({"a": [1.0]}, {"x": {"lss": ("a", "a")}})


def test_every_claim_has_a_known_experiment_and_every_experiment_a_claim() -> None:
    assert names() == list(PAPERS)
    used = set()
    for name in names():
        paper = read_paper(name)  # parses the options of every claim
        assert paper.claim and all(claim.says and claim.printed for claim in paper.claim), name
        used |= {claim.experiment for claim in paper.claim}
    assert used == set(plugins.names("experiment"))


@pytest.mark.parametrize("name", PAPERS)
def test_every_table_and_figure_has_a_claim_or_a_reason_why_not(name: str) -> None:
    paper = read_paper(name)
    named = [claim.id for claim in paper.claim] + [one for left in paper.left_out for one in left.ids]
    covered = {match[0] for one in named if (match := re.match(r"(Figure|Table) \w+", one))}
    num_figures, printed_tables = PRINTED[name]
    assert covered == {f"Figure {n + 1}" for n in range(num_figures)} | {f"Table {n}" for n in printed_tables}
    whole = {one for left in paper.left_out for one in left.ids}
    assert not whole & {claim.id for claim in paper.claim}  # a figure is repeated or it is not


def test_the_guides_table_of_directors_gains_has_a_claim_for_each_cell() -> None:
    known = [claim.options for claim in read_paper("director").claim if claim.experiment == "expert_parallel"]
    tasks = [(options.get("compositions", ["mixed"]), options.get("new_tokens", 64)) for options in known]
    cells = {(composition, new_tokens) for compositions, new_tokens in tasks for composition in compositions}
    assert {(tasks, new_tokens) for tasks in ("mixed", "one task") for new_tokens in (8, 64)} <= cells


def test_given_traces_bring_the_costs_of_their_model(tmp_path: Path) -> None:
    """Wherever a recipe names machine and model, with those of a line; a model alone, as of Table 2, stays."""
    routed = {"there": write_trace(tmp_path / "trace", make_spec(24, 32, 4), num_requests=2, prompt_tokens=1)}
    toy = {"there": write_trace(tmp_path / "toy", make_spec(2), num_requests=2)}
    for name in ("director", "duoserve"):
        paper = read_paper(name)
        assert priced(paper, toy) == priced(paper, {}) == paper
        changed = priced(paper, routed)
        assert changed.machine == replace(paper.machine, model="gpt-oss-20b")
        for claim in changed.claim:
            choices = [claim.options, *(claim.options.get("lines", {}).values())]
            choices += [line["machine"] for line in choices if isinstance(line.get("machine"), dict)]
            assert {one["model"] for one in choices if {"machine", "model"} <= one.keys()} <= {"gpt-oss-20b"}
    assert priced(read_paper("prism"), routed) == read_paper("prism")  # its claims fix the bytes of an expert
    (memory,) = {repr(claim.options) for claim in changed.claim if claim.experiment == "memory"}
    assert "mixtral-8x7b-int4" in memory


def test_costs_are_those_of_every_compared_machine() -> None:
    def costs(name: str, says: str) -> list[str]:
        paper = read_paper(name)
        return costs_of(next(claim for claim in paper.claim if says in claim.says), paper)

    qwen = "qwen1.5-moe-a2.7b"
    assert costs("finemoe", "smaller on an A100") == [f"{qwen} on rtx-3090", f"{qwen} on a100-80gb"]
    assert costs("finemoe", "on an A100 FineMoE has the lowest time to first") == [f"{qwen} on a100-80gb"]
    assert costs("finemoe", "FineMoE hits more than") == [f"{qwen} on rtx-3090"]
    assert costs("prism", "printed: MultiData, on Mixtral") == ["mixtral-8x7b on a100-40gb"]
    assert costs("smoe", "inactive ones") == costs("director", "better than annealing") == []


def test_every_difference_in_the_tables_has_a_reason() -> None:
    """The recorded verdicts of tests/bench/README.md; a reason says why, and what would change the verdict."""
    text = (Path(__file__).parents[4] / "tests" / "bench" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ,()]+) \| ([^|]+) \|.*\| differs \|", text, re.MULTILINE)
    reasons = {(claim.id, claim.says): claim.reason for name in PAPERS for claim in read_paper(name).claim}
    assert len(rows) > 20 and [row for row in rows if not re.search(r"\bchanges?\b", reasons[row])] == []


def test_links_are_varied_for_claims_that_they_can_change(tmp_path: Path) -> None:
    paper = read_paper("finemoe")
    slow = with_links(paper, 0.5)
    assert slow.machine.assumed().load_s == 2 * paper.machine.assumed().load_s
    assert {claim.experiment for claim in slow.claim} == {"policies", "online"}
    few = replace(paper, claim=tuple(choose(paper.claim, ["Figure 18"])))
    assert with_links(few, 0.5).claim == ()
    trace = {"there": write_trace(tmp_path / "trace", make_spec(2), num_requests=8)}
    values = []
    for one in (parse_paper(RECIPE, "test"), with_links(parse_paper(RECIPE, "test"), 0.5)):
        (row,) = run_paper(one, tmp_path, given=trace)
        values.append(row["values"])
    assert values[1]["0 % remote"] == values[0]["0 % remote"]
    assert values[1]["100 % remote"][0] > values[0]["100 % remote"][0]


def test_jobs_run_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes find what one finds; an error of one paper is raised after the others' rows are written."""
    trace = {"there": write_trace(tmp_path / "trace", make_spec(2), num_requests=8)}
    good, bad = str(tmp_path / "good.toml"), str(tmp_path / "bad.toml")
    Path(good).write_text(RECIPE)
    Path(bad).write_text(RECIPE.replace('order = ["0 %', 'order = ["9 %'))

    def run(jobs: int, *papers: str) -> None:
        options = PaperOptions(names=papers, links=(0.5,), jobs=jobs)
        run_papers(options, trace, tmp_path / "work", tmp_path / f"{jobs}.json")

    def rows(jobs: int) -> list[Row]:
        written = read_result(tmp_path / f"{jobs}.json").rows
        return sorted(({**row, "seconds": 0.0} for row in written), key=lambda row: -float(row["links"]))

    def refuse(*_: object) -> None:
        raise AssertionError("run in the first process")

    run(1, good)
    alone = rows(1)
    assert [row["links"] for row in alone] == [1.0, 0.5] and alone[0]["values"] != alone[1]["values"]
    monkeypatch.setattr(remote_share, "run", refuse)
    with refused(UsageError, "9 % remote"):
        run(2, bad, good)
    assert rows(2) == alone


def test_questions_of_our_own_are_not_counted_among_the_claims(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    asked = RECIPE[RECIPE.index("[[claim]]") :].replace('id = "Table I"', 'id = "Table II"') + "ours = true\n"
    recipe.write_text(RECIPE + 'reason = "two traces"\n' + asked)
    trace = {"there": write_trace(tmp_path / "trace", make_spec(2), num_requests=8)}
    made = run_papers(PaperOptions(names=(str(recipe),)), trace, tmp_path / "work")
    shown = list(tables(made))
    claims, own = (one for one in shown if hasattr(one, "rows"))
    assert "does not answer" in own.title and len(claims.rows) == len(own.rows) == 1
    assert "1 undecided of 1" in shown and "Table I, undecided: two traces" in shown
    assert [row[-2] for row in claims.rows] == [row[-1] for row in own.rows] == ["1"]  # both were measured alike
    (run,) = (line for line in shown if isinstance(line, str) and line.startswith("run "))
    assert run.startswith(f"run 1: {made.rows[0]['on']}; ") and "seed" in run and run.endswith("an assumed machine")
    for row in made.rows:  # as results of an earlier version
        for name in ("best", "highest_best", "whole_layers", "expert_bytes"):
            row.pop(name, None)
    assert figures(made)["table-i"].values == made.rows[0]["values"]


def test_invalid_recipes_are_refused() -> None:
    for change, message in (
        (("remote_share", "remote_shre"), "did you mean 'remote_share'"),
        (("remote = [", "remot = ["), "of test, Table I, remote_share"),
        (("order =", "ordr ="), "check"),
        (('experiment = "remote_share"', 'experiment = "policies"'), "lines"),
        (("seeds = 1", "seeds = 0"), "seeds"),
        (("[paper]", "[paper"), "not valid TOML"),
        (("[[claim]]", "[[left_out]]\nids = []\nwhy = 'none'\n[[claim]]"), "ids and why"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_paper(RECIPE.replace(*change), "test")


def test_claims_share_a_setup_and_may_extend_it() -> None:
    shared = RECIPE.replace('experiment = "remote_share"', 'setup = "shares"').replace(
        "[[claim]]",
        """[setup.shares]
experiment = "remote_share"
options = { mbps = 100.0, remote = [0.5] }
[[claim]]""",
    )
    (claim,) = parse_paper(shared, "test").claim
    assert (claim.experiment, claim.options) == ("remote_share", {"mbps": 100.0, "remote": [0.0, 1.0]})
    for text, message in (
        (shared.replace('setup = "shares"', 'setup = "share"'), "did you mean 'shares'"),
        (RECIPE.replace('experiment = "remote_share"', ""), "either a setup or an experiment"),
        (RECIPE.replace("remote_share", "os.path"), "os.path is not an experiment: it has no Options and no run"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_paper(text, "test")


def test_claims_are_chosen_by_table_and_figure() -> None:
    claims = read_paper("prism").claim
    assert {claim.id for claim in choose(claims, ["figure 8"])} == {"Figure 8(a)", "Figure 8(b)"}
    assert {claim.id for claim in choose(claims, ["Table I"])} == {"Table I"}
    with refused(UsageError, "Figure 80"):
        choose(claims, ["Figure 80"])


def test_wrong_results_differ_and_poor_traces_cannot_be_tested(tmp_path: Path) -> None:
    trace = {
        str(seed): write_trace(tmp_path / f"trace-{seed}", make_spec(2), num_requests=8, seed=seed) for seed in range(3)
    }
    answers = {}
    recipe = RECIPE.replace("seeds = 2", "seeds = 3")
    for text in (recipe, recipe.replace('"0 % remote", "100 % remote"', '"100 % remote", "0 % remote"')):
        (row,) = run_paper(parse_paper(text, "test"), tmp_path, given=trace)
        answers[row["check"]["order"][0]] = row["verdict"]
    assert answers == {"0 % remote": "agrees", "100 % remote": "differs"}
    other = RECIPE.replace("remote_share", "replica_agreement").replace("{ remote = [0.0, 1.0] }", "{}")
    (row,) = run_paper(parse_paper(other, "test"), tmp_path, given=trace)
    assert row["verdict"] == "cannot be tested here" and "values" not in row


def test_requests_queue_for_their_own_or_the_first_free_server() -> None:
    work = [(0.0, 0, 4.0), (1.0, 0, 2.0), (1.0, 1, 1.0), (2.0, 0, 1.0)]
    known = lambda _, seconds: seconds  # noqa: E731
    assert serve_in_turn(work, 2, known) == [(0, 4.0), (0, 5.0), (1, 1.0), (0, 5.0)]
    # Redirected: the second goes to server 1, free at once; the third waits for that until 3, the last too.
    assert serve_in_turn(work, 2, known, redirect=True) == [(0, 4.0), (0, 2.0), (1, 3.0), (0, 3.0)]
    assert mean_by_server([(0, 2.0), (2, 4.0), (0, 4.0)]) == [3.0, 4.0, pytest.approx(10 / 3)]


def test_profile_has_the_costs_of_the_assumed_machine() -> None:
    machine = AssumedMachine(expert_s=2e-3, expert_token_s=1e-3, load_s=5e-3, host_s=4e-3, host_token_s=0.0)
    profile, options = machine.profile(make_spec(2))
    assert profile.on("cuda").expert(3) == pytest.approx(4e-3)
    prices = Prices(profile, profile.spec, options)
    assert prices.load_ns("pinned", 0) == 5_000_000
    assert prices.host_costs()["host_s"] == pytest.approx(4e-3)
    with refused(UsageError, "load_s"):
        AssumedMachine(load_s=-1.0)


@pytest.mark.parametrize("request_T", [(0, 1, 2), (0, 0, 0), (0, 0, 1)])
def test_a_batch_reads_the_dense_weights_once(request_T: tuple[int, ...]) -> None:
    machine = AssumedMachine(dense_s=4e-3, dense_token_s=1e-3, shared_s=2e-3, shared_token_s=0.5e-3)
    spec = replace(make_spec(2), layer_ids_L=(1, 2))
    profile, options = machine.profile(spec)
    phases = tuple(Phase.PREFILL if request_T.count(request) > 1 else Phase.DECODE for request in request_T)
    info = ForwardInfo(forward_id=0, request_T=request_T, phase_T=phases, position_T=(5, 6, 7))
    costs = Prices(profile, spec, options).forward(info)
    # of three tokens, after a dense layer and without one; the head reads weights once too
    assert costs == ForwardCosts(before_L=(12_000_000, 6_000_000), after=3_000_000, rest=6_000_000)


def test_a_trace_of_the_embedded_model_is_captured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(prompts=1, new_tokens=2, epochs=1)
    bench = Workbench(sizes=sizes, machine=AssumedMachine(), work=tmp_path)
    trace = bench.trace(("arithmetic", "exam"))
    assert bench.trace(("arithmetic", "exam")) is trace
    assert sorted(trace.requests["dataset"].to_pylist()) == ["arithmetic", "exam"]
    assert trace.columns >= {"experts", "weights", "logits", "embeddings", "hidden", "ahead"}
    trained = [bench.trained("popularity", trace, seed=seed) for seed in (0, 1)]
    found = bench.measured("answer", [1], lambda: {"is": 42.0})

    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("made again")

    for name in ("capture", "train"):
        monkeypatch.setattr(f"moetool.bench.paper.workbench.{name}", refuse)
    later = Workbench(sizes=sizes, machine=AssumedMachine(), work=tmp_path)
    assert later.trace(("arithmetic", "exam")).sha256 == trace.sha256
    assert [later.trained("popularity", trace, seed=seed) for seed in (0, 1)] == trained
    assert trained[0] != trained[1]
    assert later.measured("answer", [1], lambda: {"is": 0.0}) == found == {"is": 42.0}
    assert later.measured("answer", [2], lambda: {"is": 0.0}) == {"is": 0.0}
    with pytest.raises(AssertionError, match="made again"):
        Workbench(sizes=replace(sizes, new_tokens=3), machine=AssumedMachine(), work=tmp_path).trace(("arithmetic",))


def _imported(file: Path, root: Path) -> set[Path]:
    """Modules of the repository that a file imports, at its top or later."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    own = [name.replace(".", "/") for name in names if name.partition(".")[0] in ("moetool", "predictors")]
    return {path for name in own for path in (root / f"{name}.py", root / name / "__init__.py") if path.exists()}


def test_kept_results_depend_on_all_code_that_makes_them() -> None:
    """The key covers every module that capture, training and replicas import, directly or not."""
    root = Path(__file__).parents[4]
    files = set(code_files())
    made_by = (
        "capture/run",
        "training/training",
        "training/quantize/replica",
        "training/quantize/calibration",
        "trace/edit",
    )
    todo = [root / "moetool" / f"{name}.py" for name in (*made_by, "prompts/gather")]
    todo += [root / "predictors" / f"{name}.py" for name in plugins.names("predictor")]
    reached: set[Path] = set()
    while todo:
        file = todo.pop()
        if file not in reached:
            reached.add(file)
            todo += _imported(file, root)
    assert len(reached) > 100
    assert not reached - files
    names = {str(file.relative_to(root)) for file in files}
    assert {name for name in names if name.startswith("moetool/bench/")} == {
        "moetool/bench/paper/workbench.py",
        "moetool/bench/paper/experiments/replica_agreement.py",
    }
    assert not any(name.startswith(("moetool/cli/", "moetool/simulation/", "tests/")) for name in names)


def test_own_predictors_are_retrained_when_their_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kept_lab" / "own.py"
    file.parent.mkdir()
    file.write_text("from predictors.popularity import Options, Predictor\n")
    monkeypatch.syspath_prepend(tmp_path)
    trace = Trace(write_trace(tmp_path / "trace"))

    def trained() -> Path:
        return Workbench(sizes=Sizes(), machine=AssumedMachine(), work=tmp_path).trained("kept_lab.own", trace)

    first = trained()
    assert trained() == first
    file.write_text('"""Wording."""\n' + file.read_text() + "# a comment\n")
    assert trained() == first
    file.write_text(file.read_text() + "LOOKAHEAD = 2\n")
    assert trained() != first


def test_code_is_compared_without_docstrings_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    code = 'class A:\n    """Text."""\n    x: int = 1\n    """Meaning."""\n    def f(self):\n        """Text."""\n'
    file.write_text(code)
    first = parsed(file)
    for same in (
        code.replace("Text", "Words"),
        code.replace("= 1", "=  1  # why"),
        code.replace('    """Meaning."""\n', ""),
    ):
        file.write_text(same)
        assert parsed(file) == first
    for other in (code.replace("= 1", "= 2"), code.replace("= 1", '= "1"'), code + "        return 'text'\n"):
        file.write_text(other)
        assert parsed(file) != first
