"""Compare two forms of one model in the same memory: its experts as stored and those of a packed replica.

Both forms have equal bytes of dense weights, KV cache and expert pool, memory for unpacking included. Every line runs
once per round, cold, on the same prompts; each form continues with its own tokens. The rounding error of the packed
form is measured too, except for a shape: its random weights are rounded to nearest and follow the routes of a trace.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moetool import tables as printed
from moetool.bench.bench_result import BenchResult, recorded, table
from moetool.bench.forced_routes import ForcedRoutes, bench_spec
from moetool.bench.rounded_checkpoint import rounded_checkpoint
from moetool.bench.serve import LineToServe, measure_rounds, workload_facts
from moetool.bench.serving_results import describe
from moetool.bench.serving_runs import Workload
from moetool.bench.serving_setup import ServingBenchOptions, Subject, open_setup, prompts_of
from moetool.caching._policy import MIN_SLOTS, build_policy, parse_options, policy_class
from moetool.config import parse_bytes
from moetool.errors import CapacityError, MismatchError, UsageError
from moetool.json_files import read_json
from moetool.learning.predictor import CARD
from moetool.machine import memory_bytes
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import LoadedModel, load_lazy, parse_dtype, use_threads
from moetool.models.packed import Scheme
from moetool.quantize.judging import judge
from moetool.runtime.copies import stride_of
from moetool.runtime.decoding import kv_cache_bytes

_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A checkpoint in memory without its experts, and its bytes.

    Attributes:
        name: data type of the experts.
        title: display name of the checkpoint.
    """

    name: str
    title: str
    loaded: LoadedModel
    dense_bytes: int


def bench_forms(
    subject: Subject,
    beside: str,
    *,
    policies: Sequence[str],
    budgets: Sequence[str],
    options: ServingBenchOptions | None = None,
    policy_options: Mapping[str, Mapping[str, Any]] | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
    file: Path | None = None,
) -> BenchResult:
    """Time a model and its packed replica with every policy and budget, at batch 1; arguments as of `bench_serve`.

    Args:
        beside: the replica's folder, whose calibration prompts are left out; a shape's replica is made from it.
        budgets: memory for the model's experts, or for the replica's and their unpacking: bytes, or a share.

    Effects: sets torch's number of threads; allocates one pool at a time; writes a shape's two checkpoints and the
        part of the trace into `subject.work`.

    Raises:
        UsageError: an unknown name, a policy that needs a predictor or the future, or experts that cannot be packed.
        MismatchError: the replica belongs to another model, or is not smaller than the model.
        CapacityError: a budget, or the machine's memory, is too small.
    """
    chosen, values = options or ServingBenchOptions(), policy_options or {}
    for name in policies:
        kind = policy_class(name)
        if kind.needs_predictor or kind.needs_future:
            what = "a predictor" if kind.needs_predictor else "the future"
            raise UsageError(f"policy {name} needs {what}, which belongs to one form of a model; leave it out here")
    with contextlib.ExitStack() as stack, recorded("forms", chosen, file) as made:
        forms, workload, forced = _open(subject, beside, policies, chosen, stack)
        dtype = forms[0].loaded.model.dtype
        kv = kv_cache_bytes(forms[0].loaded.model.config.get_text_config(), dtype, workload.kv_tokens)
        whole = forms[0].loaded.spec.all_experts_bytes
        sizes = sorted({parse_bytes(text, whole) for text in budgets})
        entries, made.notes = _entries(forms, policies, sizes, values, kv)
        made.facts = {
            "model": forms[0].title,
            "beside": forms[1].title,
            "experts_bytes": {form.name: form.loaded.spec.all_experts_bytes for form in forms},
            **workload_facts([form.loaded for form in forms], workload),
        }
        measure_rounds(made, entries, workload, forced, chosen, on_progress)
        if forced is None:  # routers of random weights mean nothing
            judged = judge(forms[0].loaded.checkpoint, forms[1].loaded.checkpoint, _blocks(workload), dtype)
            made.facts["judged"] = {name: getattr(judged, name) for name in ("tokens", "kl", "top1", "match")}
    return made


def _open(
    subject: Subject, beside: str, policies: Sequence[str], options: ServingBenchOptions, stack: contextlib.ExitStack
) -> tuple[list[_Form], Workload, ForcedRoutes | None]:
    """Load the two forms, their inputs, and the forced routes if there are any.

    Effects: sets torch's number of threads; closes and removes its objects at the end of `stack`.
    """
    if subject.shape is not None:
        scheme = Scheme(bits=4, group=options.group)
        setup = open_setup(subject, options, {name: policy_class(name) for name in policies}, stack)
        path = rounded_checkpoint(setup.loaded.checkpoint, scheme)
        other = load_lazy(Checkpoint(path), setup.loaded.model.dtype, products=options.products)
        stack.callback(other.close)
        assert setup.forced is not None and setup.part is not None
        setup.forced.attach(other.layers)
        other = replace(other, spec=bench_spec(other.spec, setup.part))
        forms = [
            _form(setup.name, setup.loaded, options.products),
            _form(f"itself rounded to nearest, groups of {scheme.group}", other, options.products),
        ]
        return forms, setup.workload, setup.forced
    assert subject.model is not None
    pair = [Checkpoint.open(subject.model), Checkpoint.open(beside)]
    _require_same_shape(*pair)
    workload = prompts_of(pair[0], subject.data, _seen_prompts(pair[1].path), options)
    forms = []
    for checkpoint in pair:
        loaded = load_lazy(checkpoint, parse_dtype(options.dtype or "float32"), products=options.products)
        stack.callback(loaded.close)
        forms.append(_form(checkpoint.name, loaded, options.products))
    use_threads(pair[0].config, options.threads)
    return forms, workload, None


def _form(title: str, loaded: LoadedModel, products: bool) -> _Form:
    checkpoint, quantization = loaded.checkpoint, loaded.checkpoint.quantization
    name = str(checkpoint.expert_dtype).removeprefix("torch.")
    if quantization is not None:
        name = "+".join(dict.fromkeys(format.name for format in quantization.formats))
    dense = checkpoint.dense_bytes(loaded.model.dtype, loaded.device.type, products)
    return _Form(name=name, title=title, loaded=loaded, dense_bytes=dense)


def _require_same_shape(model: Checkpoint, other: Checkpoint) -> None:
    """Raises: MismatchError: the second checkpoint is not the first model in a smaller form."""
    first, second = model.spec, other.spec
    shapes = [
        (one.layer_ids_L, one.num_experts_L, one.top_k_L, one.hidden_size, one.score_function)
        for one in (first, second)
    ]
    if shapes[0] != shapes[1]:
        raise MismatchError(
            f"{other.path} has other layers or experts than {model.path}, expected a form of the same model; "
            f"make one with 'moetool train awq_replica {model.path} --data all --out DIR'"
        )
    if other.quantization is None or second.slot_bytes >= first.slot_bytes:
        raise MismatchError(
            f"{other.path} has experts of {second.slot_bytes:,} bytes and {model.path} of {first.slot_bytes:,}, "
            "expected smaller, packed ones after --beside; swap the two, or give a packed replica"
        )


def _seen_prompts(path: Path) -> frozenset[str]:
    """Calibration prompts of a replica; empty without a card."""
    card = path / CARD
    if not card.is_file():
        return frozenset()
    again = "make the replica again with: moetool train awq_replica"
    return frozenset(read_json(card, advice=again, constants=True).get("seen_prompts") or ())


def _entries(
    forms: Sequence[_Form],
    policies: Sequence[str],
    budgets: Sequence[int],
    values: Mapping[str, Mapping[str, Any]],
    kv_bytes: int,
) -> tuple[list[LineToServe], list[str]]:
    """Lines to run: one per policy, budget and form. Raises: CapacityError: none fits, or memory is too small."""
    entries: list[LineToServe] = []
    notes: list[str] = []
    for policy in policies:
        kind = policy_class(policy)
        for budget in budgets:
            memory = forms[0].dense_bytes + kv_bytes + budget
            for form in forms:
                spec, given = form.loaded.spec, values.get(policy, {})
                room = memory - form.dense_bytes - kv_bytes
                assert form.loaded.files is not None
                slots = min(room // stride_of(form.loaded.files.slot_bytes), spec.total_experts)
                fewest = max(MIN_SLOTS, kind.min_slots(spec, parse_options(policy, given)))
                if slots < fewest:
                    notes.append(
                        f"{policy} needs {fewest} slots: {form.name} left out with {printed.count(budget, 'B')}"
                    )
                    continue
                build = partial(build_policy, policy, spec, given, slots)
                line = LineToServe(
                    form.loaded,
                    policy,
                    build,
                    budget,
                    slots,
                    form=form.name,
                    more={"form": form.name, "memory_bytes": memory},
                )
                entries.append(line)
    if not entries:
        raise CapacityError(f"no budget is large enough: {'; '.join(notes)}; give larger budgets")
    most = max(entry.more["memory_bytes"] for entry in entries)
    if most > (free := memory_bytes()[1]):
        raise CapacityError(f"the largest line needs {most:,} bytes, but {free:,} are free; give smaller budgets")
    return entries, notes


def _blocks(workload: Workload) -> torch.Tensor:
    """The prompts' tokens in blocks of one length."""
    ids = [token for prompt in workload.prompts for token in prompt]
    length = min(_BLOCK_TOKENS, len(ids))
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def tables(made: BenchResult) -> Iterator[Any]:
    """The table of policies, budgets and forms, and how far the second form's outputs are from the first's.

    `kl` is the mean KL divergence of the next token in nats; `top1`, the share of tokens with the same most likely next
    token; `match`, the share of experts that both choose.
    """
    facts = made.facts
    sizes = " and ".join(f"{printed.count(size, 'B')} as {form}" for form, size in facts["experts_bytes"].items())
    yield from describe(made, f"{facts['model']} beside {facts['beside']}: experts of {sizes}")
    yield table(
        "equal memory; times in milliseconds",
        made.rows,
        {
            "experts": ("form", "s"),
            "policy": ("policy", "s"),
            "memory": ("memory_bytes", "bytes"),
            "for experts": ("budget_bytes", "bytes"),
            "slots": ("slots", "d"),
            "hits": ("hit_rate", ".3f"),
            "MB/prompt": ("prompt_bytes", "MB"),
            "MB/token": ("bytes_per_token", "MB"),
            "TTFT": ("ttft_s", "ms"),
            "TPOT p50": ("tpot_p50_s", "ms"),
            "tokens/s": ("tokens_s", ",.1f"),
            "CPU/prompt": ("prompt_cpu_s", "ms"),
            "CPU/token": ("token_cpu_s", "ms"),
            "stall": ("stall_share", ".0%"),
        },
        num_text=2,
        num_keys=3,
    )
    if judged := facts.get("judged"):
        yield (
            f"on the {judged['tokens']:,} tokens of the prompts: KL divergence {judged['kl']:.5f} nats, same next "
            f"token {judged['top1']:.3f}, experts matched {judged['match']:.4f}"
        )
