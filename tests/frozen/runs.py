"""Runs of the cases. Only this module calls moetool, so only it changes when interfaces move."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

import moetool
from moetool.base import plugins
from moetool.base.families import FAMILIES
from moetool.caching.decision_digest import DecisionDigest
from moetool.caching.plan import CachePlan
from moetool.caching.policy import policy_class
from moetool.kernels.cpu.scaled_weight import ScaledWeight
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.location import locate
from moetool.models.loading import load_lazy
from moetool.models.packed_linear import PackedLinear
from moetool.models.tested_formats import INFERRED_AND_RUN
from moetool.prompts.gather import Prompt
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.request import Output, SamplingParams
from tests import edge, families, profiles, ranks, servers, synthetic_routes
from tests.frozen.record import Kinds, digest

SERVED_FAMILIES = (*sorted(name for name, family in FAMILIES.items() if not family.refused), *INFERRED_AND_RUN)
"""Families whose text models can be made; those that transformers has only within others are `families.MULTIMODAL`."""
REFERENCE = locate("reference")
_LONG = [(7 * i + 3) % 60 + 3 for i in range(14)]
_ROUNDS = (
    (_LONG, [(5 * i + 9) % 60 + 3 for i in range(7)]),
    ([*_LONG, 31, 8, 44, 20, 57],),  # begins as the first prompt
    ([(11 * i + 1) % 60 + 3 for i in range(9)], _LONG[:5], [40]),
)
"""Prompts of each batch, in tokens of the tiny models."""
_NEW_TOKENS = 4
_TEXTS = ("Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said")


def serve(
    path: Path,
    *,
    policy: str = "lru",
    slots: int | None,
    dtype: str = "float32",
    prefix_caching: bool = True,
    pooled: bool = False,
) -> Kinds:
    """Serve three batches with an engine stepped by hand.

    Args:
        slots: expert slots; None: one for every expert, filled before the first forward as without `--log`.
        pooled: keep slots as stored and multiply from the pool, as on a GPU.
    """
    with Checkpoint.open(path) as checkpoint, tempfile.TemporaryDirectory() as folder:
        spec, log = checkpoint.spec, Path(folder) / "log"
        options = moetool.ServeOptions(
            dtype=dtype,
            kv_tokens=256,
            max_requests=4,
            max_prompt_wait=0.0,  # chunks by measured time would differ from run to run
            prefix_caching=prefix_caching,
            io_threads=1,
            threads=1,
            oracle_s=0.0,
        )
        number = spec.total_experts if slots is None else slots
        engine = moetool.build_engine(
            checkpoint,
            options=options,
            plan=_plan(spec, policy, number),
            log=None if slots is None else log,
            **({"open_runtime": partial(ExpertRuntime, pooled=True)} if pooled else {}),
        )
        sink = None if slots is not None else _watch(engine)
        tokens, logits = _step(engine, _ROUNDS)
        metrics = engine.metrics()
        engine.close()
        counts = {
            "slots": metrics["slots"],
            "reused": metrics["tokens_reused"],
            "kept": metrics["hits_kept"],
            "prefetched": metrics["hits_prefetched"] + metrics["hits_late"],
            "missed": metrics["misses"],
            "hosted": metrics["hosted"],
            "wasted": metrics["prefetch_wasted"],
        }
        made = {
            "logits": digest(*logits),
            "tokens": digest(tokens),
            "counts": " ".join(f"{name}={count:.0f}" for name, count in counts.items()),
        }
        if sink is not None:
            return {**made, "decisions": sink.hexdigest()}
        manifest = moetool.open_trace(log).manifest
        return {**made, "decisions": manifest["provenance"]["decisions"], "routes": _rows(log)}


def products(path: Path) -> Kinds:
    """Multiply by each linear layer that stays packed in bfloat16: few rows in float32, where it can, and many.

    Logits of bfloat16 round most changes in the order of a sum away; float32 keeps them.
    """
    few, many = [], []
    with Checkpoint.open(path) as checkpoint:
        loaded = load_lazy(checkpoint, torch.bfloat16, products=True)
        for module in loaded.model.modules():
            if isinstance(module, PackedLinear):
                x = torch.randn(40, module.in_features, generator=torch.Generator().manual_seed(1))
                scaled = any(isinstance(value, ScaledWeight) for value in vars(module).values())
                few += [module(x[:rows] if scaled else x[:rows].bfloat16()) for rows in (1, 5)]
                many.append(module(x.bfloat16()))
        loaded.close()
    return {"few": digest(*few), "many": digest(*many), "layers": f"{len(many)} layers"}


def a_third(path: Path) -> int:
    """Slots for a third of a model's experts."""
    with Checkpoint.open(path) as checkpoint:
        return max(3, checkpoint.spec.total_experts // 3)


def capture() -> Kinds:
    """Capture the embedded model's routing, in two batches."""
    prompts = [
        Prompt(dataset="made", task="made", prompt_id=str(number), text=text) for number, text in enumerate(_TEXTS)
    ]
    options = moetool.CaptureOptions(
        max_new_tokens=4, batch_size=2, keep=("topk", "logits", "ahead", "resident"), threads=1, dtype="float32"
    )
    with tempfile.TemporaryDirectory() as folder:
        moetool.capture_trace("reference", prompts, Path(folder) / "trace", options)
        return {"routes": _rows(Path(folder) / "trace")}


def replays() -> dict[str, Callable[[], Kinds]]:
    """For each policy: replay a synthetic trace, with the times of a synthetic profile."""
    return {name: partial(_replay, name) for name in plugins.names("policy")}


def _replay(policy: str) -> Kinds:
    with tempfile.TemporaryDirectory() as folder:
        spec = synthetic_routes.make_spec(num_experts=16)
        columns = ("topk", "logits", "hidden", "ahead", "embeddings")
        trace = moetool.open_trace(synthetic_routes.write_trace(Path(folder) / "t", spec, num_requests=6, keep=columns))
        predictor = families.counted(spec) if policy_class(policy).needs_predictor else None
        profile = profiles.make_profile(spec, loads={"disk": profiles.line(0.01)}, predictor=2.0 if predictor else None)
        setup = moetool.ReplaySetup(predictor=predictor, profile=profile)
        budgets = [spec.slot_bytes * slots for slots in (32, 48)]
        rows = [row.to_json() for row in moetool.replay_trace(trace, [policy], budgets, setup)]
    return {"decisions": digest([row.pop("digest") for row in rows]), "timeline": digest(rows)}


def served_over_http() -> Kinds:
    """Texts and log-probabilities of the embedded model by the HTTP API."""
    with Checkpoint.open(REFERENCE) as checkpoint:
        options = moetool.ServeOptions(kv_tokens=1024, max_prompt_wait=0.0, threads=1, io_threads=1, oracle_s=0.0)
        engine = moetool.build_engine(checkpoint, options=options, plan=_plan(checkpoint.spec, "lru", 60))
        engine.start()
        answers = []
        with servers.serving(engine) as (url, _):
            for text in _TEXTS:
                for more in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}):
                    body = {"model": engine.model_name, "prompt": text, "max_tokens": 8, "logprobs": 3, **more}
                    answers.append(servers.post(url, "/v1/completions", body)[1]["choices"])
            chat = {"model": engine.model_name, "messages": [{"role": "user", "content": _TEXTS[0]}], "max_tokens": 8}
            chat |= {"temperature": 0, "logprobs": True, "top_logprobs": 2}
            answers.append(servers.post(url, "/v1/chat/completions", chat)[1]["choices"])
        return {"answers": digest(answers)}


def edge_cluster() -> Kinds:
    """Three edge servers with a third of the experts each, which ask each other on loopback."""
    with Checkpoint.open(REFERENCE) as checkpoint:
        spec, tokenizer = checkpoint.spec, checkpoint.tokenizer
    every = [(layer, expert) for layer, count in enumerate(spec.num_experts_L) for expert in range(count)]
    made: dict[str, list[Any]] = {"tokens": [], "logits": [], "decisions": []}
    with edge.cluster(REFERENCE, tokenizer, [every[n::3] for n in range(3)], slots=40) as nodes:
        sinks = [_watch(node.engine) for node in nodes.nodes]
        for number, node in enumerate(nodes.nodes):
            ids = [tokenizer(text)["input_ids"] for text in (_TEXTS[number], _TEXTS[number - 1])]
            tokens, logits = _step(node.engine, (ids, ids[:1]))
            made["tokens"].append(tokens)
            made["logits"].append(digest(*logits))
        made["decisions"] = [sink.hexdigest() for sink in sinks]
    return {kind: digest(values) for kind, values in made.items()}


def expert_parallel() -> Kinds:
    """Three expert-parallel ranks in threads, each with a third of the experts, of which five have a copy."""
    with Checkpoint.open(REFERENCE) as checkpoint:
        spec, tokenizer = checkpoint.spec, checkpoint.tokenizer
    head = ranks.open_head(
        REFERENCE, tokenizer, placed_GLE=ranks.striped(spec, 3, replicas=5), seats=2, gather_s=0.2, micro_batches=2
    )
    try:
        logits: list[list[torch.Tensor]] = [[] for _ in range(3)]
        for gpu in range(3):
            _hook(head.launcher.ranks[gpu].loaded.model, logits[gpu])
        answers = ranks.Answers(head)
        with ranks.held(head):
            requests = [answers.ask(tokenizer(text)["input_ids"], 5) for text in (*_TEXTS, *reversed(_TEXTS))]
        tokens = answers.wait(requests, timeout_s=240.0)
        head.wait_idle()
        batches = [
            [record.requests, record.steps, record.rows, record.tokens_GLE.tolist(), record.version]
            for record in head.batches
        ]
    finally:
        head.close()
    return {"tokens": digest(tokens), "logits": digest(*(digest(*one) for one in logits)), "decisions": digest(batches)}


def _plan(spec: Any, policy: str, slots: int) -> CachePlan:
    """A plan of so many slots; memory is not what limits them."""
    return CachePlan(
        spec=spec,
        policy=policy,
        options={},
        slots=slots,
        prefetch_distance=0,
        device_memory_bytes=2**36,
        dense_bytes=2**34,
        kv_bytes=2**30,
        kv_tokens=256,
        dtype="float32",
        predictor_bytes=0,
        budget_bytes=2**35,
        predictor=None,
        trace_sha256="0" * 64,
        requests_used=(0,),
        requests_held_out=(),
        evidence=(),
        reason="made",
    )


def _watch(engine: Any) -> DecisionDigest:
    """Digest an engine's decisions from here on."""
    sink = DecisionDigest()
    engine.residency.sink = sink
    return sink


def _step(engine: Any, rounds: Sequence[Sequence[list[int]]]) -> tuple[list[list[list[int]]], list[torch.Tensor]]:
    """Answer the prompts of each round as one batch; returns their tokens, and the logits of every forward."""
    logits: list[torch.Tensor] = []
    engine.state = "ready"
    made = []
    with _hooked(engine.batcher.model, logits):
        for prompts in rounds:
            tokens: dict[int, list[int]] = {}

            def sink(output: Output, tokens: dict[int, list[int]] = tokens) -> None:
                if output.error is not None:
                    raise RuntimeError(output.error)
                if output.token is not None:
                    tokens.setdefault(output.request, []).append(output.token)

            params = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True)
            requests = [engine.submit(prompt, params, sink) for prompt in prompts]
            while not engine.idle:
                engine.step()
            made.append([tokens[request] for request in requests])
    if not logits or not all(one.isfinite().all() for one in logits):
        raise ValueError("no logits, or infinite ones, which tell nothing")
    return made, logits


def _hook(model: Any, logits: list[torch.Tensor]) -> Any:
    return model.get_output_embeddings().register_forward_hook(lambda m, a, out: logits.append(out.detach().clone()))


@contextmanager
def _hooked(model: Any, logits: list[torch.Tensor]) -> Iterator[None]:
    hook = _hook(model, logits)
    try:
        yield
    finally:
        hook.remove()


def _rows(trace: Path) -> str:
    """Digest of a trace's tables."""
    tables = [pyarrow.parquet.read_table(file).to_pydict() for file in sorted(trace.rglob("*.parquet"))]
    assert tables, f"{trace} holds no table"
    return digest(*tables)
