"""The pipeline of `moetool demo` on the embedded model, with output checked against plain transformers."""

import json
import os
import shutil
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moetool.base import assets, tables
from moetool.base.errors import UsageError

QUESTIONS = (
    "User: What is the weather in London?\nAssistant:",
    "User: I would like to book a table for two in the evening.\nAssistant:",
    "def mean(values):\n    ",
    "The first president of the United States was",
    "Janet has 3 apples and buys 5 more. How many apples does she have now?",
    "Which planet is closest to the sun?\nA. Venus\nB. Mercury\nC. Mars\nAnswer:",
)
MARK = ".moetool_demo"
FILES = {"trace", "predictor", "plan.json", "memory.svg"}
"""Results; a directory with all of them is a demo's, even without the mark."""
NEW_TOKENS = 24
SHARES = (0.125, 0.25, 0.5)
CURVES = {"lru": "lru", "lfu": "lfu", "foresight": "foresight", "belady": "belady: the bound without prefetching"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoAnswer:
    """A server's result for the questions under one policy and budget."""

    policy: str
    slots: int
    pool_bytes: int
    hit_rate: float
    bytes_per_token: float
    tokens_per_s: float
    identical: int
    questions: int


def run(out: Path) -> None:
    """Capture, train, evaluate, plan, replay, serve and compare; files go to `out`.

    Effects: replaces earlier results of the demo in `out`; serves on a free port of the loopback address.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, expected a directory or nothing; choose another --out")
    files = {file.name for file in out.iterdir()} if out.is_dir() else set()
    if files and MARK not in files and not files >= FILES:
        raise UsageError(
            f"{out} has no mark of an earlier demo ({MARK}), and its files may be replaced; choose another --out"
        )
    tables.narrate(f"moetool demo: a small Mixture-of-Experts model, from its gate logits to a server. Files: {out}/")
    began = time.perf_counter()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    recipe = _recipes("capture", "train", "plan", "serve")

    _say("1/5", "capture: run the plain model on prompts of seven tasks, write its gate logits to Parquet")
    _capture(out / "trace", recipe["capture"])
    _say("2/5", "train: next_use stores their routes, to predict when each expert is needed again")
    _train(out, recipe["train"])
    _say("3/5", "plan: choose a cache policy for 20 MB, scored on held-out prompts")
    plan = _plan(out, recipe["plan"])
    _say("4/5", "replay: cache policies at other memory sizes, without the model")
    _replay(out)
    _say("5/5", "serve: ask the same questions over HTTP under each policy, and of plain transformers")
    served = _serve(out, recipe["serve"])
    tables.print_table(
        f"{len(QUESTIONS)} questions of {NEW_TOKENS} tokens, one at a time; foresight with the predictor",
        [
            "policy",
            "experts in memory",
            "memory",
            "hit rate",
            "MB loaded/token",
            "tokens/s",
            "same text as transformers",
        ],
        [
            [
                row.policy,
                f"{row.slots} of {plan.spec.total_experts}",
                tables.count(row.pool_bytes, "B"),
                f"{row.hit_rate:.3f}",
                f"{row.bytes_per_token / 1e6:,.2f}",
                f"{row.tokens_per_s:,.0f}",
                "identical" if row.identical == row.questions else f"{row.identical} of {row.questions}",
            ]
            for row in served
        ],
    )
    print(f"Done in {time.perf_counter() - began:,.0f} s. The files are in {out}/:")
    print("  trace/       gate logits and experts of every token (moetool trace info)")
    print("  predictor/   next_use: card and stored routes             (moetool evaluate)")
    print("  plan.json    cache plan, reason and evidence              (moetool report)")
    print("  memory.svg   hit rate and loaded bytes by memory")
    tables.print_paragraph(
        "The toy loads an expert in microseconds, so tokens/s says little here. Hit rates and bytes carry over "
        "to large models."
    )
    print("Try next:")
    print(f"  moetool serve reference --plan {out}/plan.json")
    print("  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\")
    body = {"model": "reference", "prompt": QUESTIONS[0], "max_tokens": 18, "temperature": 0}
    print(f"       -d '{json.dumps(body)}'")
    print(f"  moetool replay --trace {out}/trace --policy lru,belady --budget 10%,30%,60%")


def _capture(out: Path, recipe: dict[str, Any]) -> None:
    from moetool.capture.resume import stage_path
    from moetool.capture.run import CaptureOptions, RunSetup, capture
    from moetool.prompts import gather as prompts

    shutil.rmtree(stage_path(out), ignore_errors=True)  # from an interrupted demo
    texts = list(prompts.load(recipe["data"], max_prompts=recipe["max_prompts"]))
    with tables.stages() as report:
        made = capture(
            "reference",
            texts,
            out,
            CaptureOptions(
                max_new_tokens=recipe["max_new_tokens"],
                batch_size=recipe["batch_size"],
                keep=tuple(recipe["keep"].split(",")),
            ),
            RunSetup(overwrite=True, on_progress=partial(report, "capturing")),
        )
    print(
        f"     {made.requests} prompts, {made.tokens:,} tokens, {tables.count(made.bytes, 'B')} in {made.seconds:.0f} s"
    )


def _train(out: Path, recipe: dict[str, Any]) -> None:
    from moetool.base.config import parse_settings
    from moetool.training.evaluate import evaluate
    from moetool.training.match_tables import overview, print_matches
    from moetool.training.training import train

    options = parse_settings(recipe["settings"])
    card = train("next_use", out / "trace", out / "predictor", options=options, seed=recipe["seed"], overwrite=True)
    print(f"     {tables.count(card['tokens']['train'])} tokens, {card['seconds']:.0f} s")
    print_matches(overview(evaluate([out / "predictor"], out / "trace")))


def _plan(out: Path, recipe: dict[str, Any]) -> Any:
    from moetool.base.config import parse, parse_bytes, parse_settings
    from moetool.cli.cache_plans import device_budget
    from moetool.cli.flags import find_overlap
    from moetool.models.checkpoint import Checkpoint
    from moetool.runtime.serve_options import ServeOptions
    from moetool.trace.reader import Trace
    from moetool.training.predictor import load_predictor
    from moetool.tuning.cache_planning import PlanPredictor, plan_cache

    settings = parse_settings(recipe["settings"])
    options = parse(ServeOptions, settings, "recipe")
    trace = Trace(out / "trace")
    fused = load_predictor(out / "predictor")
    memory = device_budget(Checkpoint.open("reference"), options, settings, parse_bytes(recipe["device_memory"]))
    trained_on = find_overlap(trace, fused).repeated
    plan = plan_cache(trace, memory, predictor=PlanPredictor.of(fused, out / "predictor", trace, trained_on))
    plan.save(out / "plan.json")
    tables.print_paragraph(f"     {plan.slots} slots: {plan.reason}")
    return plan


def _replay(out: Path) -> None:
    from moetool.prediction.unseen_requests import held_out
    from moetool.report import drawing
    from moetool.report.figures import memory_curves
    from moetool.trace.reader import Trace
    from moetool.training.predictor import load_predictor
    from moetool.tuning.replay import ReplaySetup, replay

    trace = Trace(out / "trace")
    whole = trace.spec.total_experts * trace.spec.slot_bytes
    budgets = [int(share * whole) for share in SHARES]
    predictor = load_predictor(out / "predictor")
    requests = held_out(predictor.card, trace)
    rows = replay(trace, list(CURVES), budgets, ReplaySetup(predictor=predictor, requests=requests))
    tables.print_table(
        f"{len(requests)} held-out prompts: hit rate in decode (MB loaded/new token); belady knows the future: the "
        "bound without prefetching",
        ["policy", *(f"{tables.percent(share, '.4g')} of experts" for share in SHARES)],
        [
            [
                policy,
                *(
                    f"{row.decode.hit_rate:.3f} ({row.bytes_per_decode_token / 1e6:.2f})"
                    for row in rows
                    if row.policy == policy
                ),
            ]
            for policy in CURVES
        ],
    )
    table = [row.to_json() for row in rows]
    of = f"{trace.spec.name} in float32: {whole / 1e6:.1f} MB of experts"
    drawing.save(out / "memory.svg", 3.2, lambda figure: memory_curves.paint(figure, table, CURVES, ("MB", 1e6), of))


def _serve(out: Path, recipe: dict[str, Any]) -> list[DemoAnswer]:
    plain = _plain_answers()
    points = [("on_demand", SHARES[0]), *((policy, share) for share in SHARES for policy in ("lru", "foresight"))]
    return [_serve_one(out, policy, share, plain, recipe) for policy, share in points]


def _serve_one(out: Path, policy: str, share: float, plain: list[str], recipe: dict[str, Any]) -> DemoAnswer:
    from moetool.base.config import parse, parse_settings
    from moetool.models.checkpoint import Checkpoint
    from moetool.runtime.assembly import build_engine
    from moetool.runtime.budget import divide_with_slots
    from moetool.runtime.serve_options import ServeOptions

    options = parse(ServeOptions, parse_settings(recipe["settings"]), "recipe")
    predictor = out / "predictor" if policy == "foresight" else None
    checkpoint = Checkpoint.open("reference")
    budget = divide_with_slots(checkpoint, options, int(share * checkpoint.spec.total_experts))
    engine = build_engine(checkpoint, options=options, policy=policy, predictor=predictor, device_memory_bytes=budget)
    with _server(engine) as url:
        _ask(url, QUESTIONS[0])  # the first request after a start also loads pages and compiles kernels
        before, began = engine.metrics(), time.perf_counter()
        answers = [_ask(url, question) for question in QUESTIONS]
        seconds, after = time.perf_counter() - began, engine.metrics()
    change = {name: after[name] - before[name] for name in after}
    hits = change["hits_kept"] + change["hits_prefetched"] + change["hits_late"]
    return DemoAnswer(
        policy=policy,
        slots=int(after["slots"]),
        pool_bytes=int(after["slots_bytes"]),
        hit_rate=hits / (hits + change["misses"]),
        bytes_per_token=change["bytes_read"] / change["tokens_generated"],
        tokens_per_s=change["tokens_generated"] / seconds,
        identical=sum(a == b for a, b in zip(answers, plain, strict=True)),
        questions=len(QUESTIONS),
    )


@contextmanager
def _server(engine: Any) -> Iterator[str]:
    """An HTTP server around an engine, on a free port of the loopback address."""
    from moetool.serving import server

    http = server.HttpServer(engine, server.bind("127.0.0.1", 0))
    engine.start()
    http.start()
    try:
        http.serves(within_s=60)
        yield http.url
    finally:
        http.stop(within_s=60)
        engine.close()


def _ask(url: str, question: str) -> str:
    """One question through the OpenAI protocol."""
    body = {"model": "reference", "prompt": question, "max_tokens": NEW_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(json.load(response)["choices"][0]["text"])


def _plain_answers() -> list[str]:
    """Answers of transformers' `generate`, with the whole model in memory."""
    import torch

    from moetool.models.checkpoint import Checkpoint
    from moetool.models.loading import load_full

    checkpoint = Checkpoint.open("reference")
    tokenizer, model = checkpoint.tokenizer, load_full(checkpoint, torch.float32).model
    answers = []
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt")
        with torch.inference_mode():
            tokens = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        answers.append(tokenizer.decode(tokens[ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def _recipes(*names: str) -> dict[str, dict[str, Any]]:
    return {
        name: tomllib.loads(assets.path("recipes", "reference", f"{name}.toml").read_text(encoding="utf-8"))
        for name in names
    }


def _say(step: str, line: str) -> None:
    print()
    tables.print_paragraph(f"[{step}] {line}")
    sys.stdout.flush()
