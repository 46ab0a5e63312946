"""Greedy tokens by plain transformers and by a model served from a pool, and their comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moetool.base import plugins
from moetool.base.types import ForwardInfo, Phase
from moetool.caching.policy import MIN_SLOTS, build_policy, parse_options, policy_class
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import CPU, load_lazy
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import open_store
from moetool.runtime.loop.own_caches import open_batcher
from moetool.runtime.request import SamplingParams
from tests import families

TIE = 1e-4
"""Logit gap below which the two best tokens count as a tie."""


def prompts(count: int) -> list[list[int]]:
    """Prompts of different lengths in the tiny models' tokens."""
    return [[(7 * i + 3 * k) % 60 + 3 for i in range(3 + k % 12)] for k in range(count)]


class Greedy(NamedTuple):
    """Generated tokens per prompt, and the logit gap between the best two tokens at each."""

    tokens: list[list[int]]
    gaps: list[list[float]]

    def require_same(self, found: list[list[int]]) -> int:
        """Require equal tokens, or a first difference at a tie; returns the number of such ties."""
        ties = 0
        for ours, theirs, gaps in zip(found, self.tokens, self.gaps, strict=True):
            differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
            assert not differing or gaps[differing[0]] < TIE, (ours, theirs)
            ties += bool(differing)
        return ties


def generated(model: Any, prompts: Sequence[list[int]], max_tokens: int = 6) -> Greedy:
    """The tokens that transformers generates."""
    tokens, gaps = [], []
    for prompt in prompts:
        made = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(made.sequences[0, len(prompt) :].tolist())
        best = [logits[0].topk(2).values for logits in made.logits]
        gaps.append([float(top[0] - top[1]) for top in best])
    return Greedy(tokens, gaps)


def served(
    path: Path,
    policy: str,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int = 6,
    host_experts: int | None = None,
    products: bool = True,
) -> list[list[int]]:
    """Greedy tokens of all prompts with the policy's smallest pool; checks that the stored weights were read."""
    loaded = load_lazy(Checkpoint.open(path), torch.float32, products=products)
    files, spec = loaded.files, loaded.spec
    assert files is not None
    kind = policy_class(policy)
    slots = max(MIN_SLOTS, kind.min_slots(spec, parse_options(policy, {})))
    made = build_policy(policy, spec, {}, slots, predictor=families.counted(spec) if kind.needs_predictor else None)
    residency = Residency(made)
    host = None if host_experts is None else host_experts * (files.stored_bytes + 256)
    store = open_store(loaded, residency, num_threads=2, host_memory_bytes=host)
    runtime = ExpertRuntime(loaded, residency, store)
    batcher = open_batcher(loaded.model, max_requests=1, kv_tokens=64)
    found: list[list[int]] = [[] for _ in prompts]
    try:
        batcher.on_forward = lambda batch: runtime.begin_forward(batch.info)
        for i, prompt in enumerate(prompts):
            batcher.add(i, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
            while not batcher.idle:
                for output in batcher.step():
                    assert output.error is None, output.error
                    assert output.token is not None
                    found[output.request].append(output.token)
                runtime.end_forward()
        stats = store.stats
        stored = set(spec.expert_bytes_L)
        if len(stored) == 1:
            (each,) = stored
            assert stats.bytes_read == stats.reads * each and stats.host_bytes == stats.host_hits * each
        assert stats.reads > slots
    finally:
        batcher.close()
        runtime.close()
        loaded.close()
    return found


def require_same_under_every_policy(path: Path, expected: Greedy, prompts: Sequence[list[int]]) -> dict[str, int]:
    """Require the same tokens under every lossless policy with its smallest pool; returns the ties of each."""
    kinds = {policy: policy_class(policy) for policy in plugins.names("policy")}
    return {
        policy: expected.require_same(served(path, policy, prompts))
        for policy, kind in kinds.items()
        if kind.lossless and not kind.needs_future
    }


def forward_logits(
    path: Path,
    tokens: torch.Tensor,
    slots: int = 3,
    *,
    pooled: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> torch.Tensor:
    """Logits [T, V] of one forward of tokens [1, T] with a pool; `pooled` as on a GPU, with slots as stored."""
    loaded = load_lazy(Checkpoint.open(path), dtype, device, products=not pooled)
    residency = Residency(build_policy("lru", loaded.spec, {}, slots))
    runtime = ExpertRuntime(loaded, residency, open_store(loaded, residency, num_threads=1), pooled=pooled)
    count = tokens.shape[1]
    info = ForwardInfo(
        forward_id=0, request_T=(0,) * count, phase_T=(Phase.PREFILL,) * count, position_T=tuple(range(count))
    )
    try:
        runtime.begin_forward(info)
        with torch.inference_mode():
            logits: torch.Tensor = loaded.model(tokens.to(device), use_cache=False).logits[0]
    finally:
        runtime.close()
        loaded.close()
    return logits
