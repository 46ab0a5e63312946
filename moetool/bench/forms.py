"""Compare two forms of one model in the same memory: its experts as stored and those of a packed replica.

Both forms have equal bytes of dense weights, KV cache and expert pool, memory for unpacking included. Every line runs
once per round, cold, on the same prompts; each form continues with its own tokens. The rounding error of the packed
form is measured too, except for a shape: its random weights are rounded to nearest and follow the routes of a trace.
"""

import contextlib
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moetool import tables
from moetool.bench.forced_routes import ForcedRoutes, bench_spec
from moetool.bench.rounded_checkpoint import rounded_checkpoint
from moetool.bench.serve import LineToServe, conditions, line_of, measure_rounds
from moetool.bench.serving_results import ServingConditions, ServingLine
from moetool.bench.serving_runs import Workload
from moetool.bench.serving_setup import ServingBenchOptions, Subject, open_setup, prompts_of
from moetool.caching._policy import MIN_SLOTS, build_policy, parse_options, policy_class
from moetool.config import parse_bytes
from moetool.errors import CapacityError, MismatchError, UsageError
from moetool.json_files import read_json
from moetool.learning.predictor import CARD
from moetool.machine import load_average, memory_bytes
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import LoadedModel, load_lazy, parse_dtype, use_threads
from moetool.models.packed import Scheme
from moetool.quantize.judging import judge
from moetool.runtime.copies import stride_of
from moetool.runtime.decoding import kv_cache_bytes

_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class FormsBench(ServingConditions):
    """Results of a bench of two forms.

    Attributes:
        model, beside: the two checkpoints.
        experts_bytes: bytes of all experts, by form.
        disk_bytes_s: disk rate for whole experts with the best number of threads, by form; medians over rounds.
        lines: lines of the model and the other form, alternating.
        judged_tokens: prompt tokens in the comparison of the two; 0 for random weights.
        kl: mean KL divergence of the other form's next token from the model's, in nats.
        top1, match: share of tokens with the same most likely next token; share of experts that both choose.
    """

    model: str
    beside: str
    experts_bytes: dict[str, int]
    disk_bytes_s: dict[str, float]
    lines: tuple[ServingLine, ...]
    judged_tokens: int = 0
    kl: float = 0.0
    top1: float = 0.0
    match: float = 0.0


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
    command: str = "",
    on_progress: Callable[[int], None] = lambda done: None,
) -> FormsBench:
    """Time a model and its packed replica with every policy and budget, at batch 1.

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
    busy = load_average()
    with contextlib.ExitStack() as stack:
        forms, workload, forced = _open(subject, beside, policies, chosen, stack)
        dtype = forms[0].loaded.model.dtype
        kv = kv_cache_bytes(forms[0].loaded.model.config.get_text_config(), dtype, workload.kv_tokens)
        whole = forms[0].loaded.spec.all_experts_bytes
        entries, notes = _entries(forms, policies, sorted({parse_bytes(b, whole) for b in budgets}), values, kv)
        found = measure_rounds(entries, workload, forced, chosen, on_progress)
        made = FormsBench(
            model=forms[0].title,
            beside=forms[1].title,
            experts_bytes={form.name: form.loaded.spec.all_experts_bytes for form in forms},
            disk_bytes_s={form.name: statistics.median(found.rates(form.name)) for form in forms},
            lines=tuple(
                line_of(entry, mine, None, found.rates(entry.form))
                for entry, mine in zip(entries, found.runs, strict=True)
            ),
            **conditions([form.loaded for form in forms], workload, chosen, busy, command, notes),
        )
    if forced is not None:
        return made
    judged = judge(forms[0].loaded.checkpoint, forms[1].loaded.checkpoint, _blocks(workload), dtype)
    return replace(made, judged_tokens=judged.tokens, kl=judged.kl, top1=judged.top1, match=judged.match)


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
        if not options.keep:
            stack.callback(shutil.rmtree, path)
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
    workload = prompts_of(pair[0].tokenizer, subject.data, _seen_prompts(pair[1].path), options)
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
                        f"{policy} needs {fewest} slots: {form.name} left out with {tables.count(budget, 'B')}"
                    )
                    continue
                build = partial(build_policy, policy, spec, given, slots)
                line = LineToServe(form.loaded, policy, build, budget, slots, form=form.name, memory_bytes=memory)
                entries.append(line)
    if not entries:
        raise CapacityError(f"no budget is large enough: {'; '.join(notes)}; give larger budgets")
    most = max(entry.memory_bytes for entry in entries)
    if most > (free := memory_bytes()[1]):
        raise CapacityError(f"the largest line needs {most:,} bytes, but {free:,} are free; give smaller budgets")
    return entries, notes


def _blocks(workload: Workload) -> torch.Tensor:
    """The prompts' tokens in blocks of one length."""
    ids = [token for prompt in workload.prompts for token in prompt]
    length = min(_BLOCK_TOKENS, len(ids))
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def print_forms(made: FormsBench) -> None:
    """Print the table, with conditions above it and the comparison of the two forms below."""
    sizes = " and ".join(f"{tables.count(size, 'B')} as {form}" for form, size in made.experts_bytes.items())
    rates = " and ".join(f"{tables.count(rate, 'B')}/s as {form}" for form, rate in made.disk_bytes_s.items())
    made.print_header(f"{made.model} beside {made.beside}: experts of {sizes}", f"whole experts read at {rates}")
    columns: dict[str, Callable[[ServingLine], str]] = {
        "experts": lambda line: line.form,
        "policy": lambda line: line.policy,
        "memory": lambda line: tables.count(line.memory_bytes, "B"),
        "for experts": lambda line: tables.count(line.budget_bytes or 0, "B"),
        "slots": lambda line: str(line.slots),
        "hits": lambda line: "" if line.hit_rate is None else f"{line.hit_rate:.3f}",
        "MB/prompt": lambda line: f"{line.prompt_bytes / 1e6:,.2f}",
        "MB/token": lambda line: f"{line.bytes_per_token / 1e6:,.3f}",
        "TTFT": lambda line: f"{line.ttft_s * 1e3:,.1f}",
        "TPOT p50": lambda line: f"{line.tpot_p50_s * 1e3:,.1f}",
        "tokens/s": lambda line: f"{line.tokens_s:,.1f}",
        "CPU/prompt": lambda line: f"{line.prompt_cpu_s * 1e3:,.0f}",
        "CPU/token": lambda line: f"{line.token_cpu_s * 1e3:,.1f}",
        "stall": lambda line: tables.percent(line.stall_share, ".0f"),
    }
    tables.table_of("equal memory; times in milliseconds", made.lines, columns, num_text=2, num_keys=3).print()
    if made.judged_tokens:
        tables.print_paragraph(
            f"on the {made.judged_tokens:,} tokens of the prompts: KL divergence {made.kl:.5f} nats, same next token "
            f"{made.top1:.3f}, experts matched {made.match:.4f}"
        )
    for note in made.notes:
        tables.print_paragraph(note)
