"""Logits of a prompt and three more tokens from a pool of slots, compared with plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moetool.base.types import ForwardInfo, Phase
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.kernels.cpu.int4 import KernelWeight
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, load_lazy
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import ExpertStore
from tests.engines import RandomPolicy


def served_logits(
    path: Path,
    slots: int,
    *,
    dtype: torch.dtype,
    products: bool,
    seed: int | None = None,
    vocabulary: int = 1211,
    kept: Any = KernelWeight,
) -> Any:
    """Logits of a prompt and three more tokens, with a pool of `slots` slots.

    Args:
        kept: form of the matrices in slots.
    """
    loaded = load_lazy(Checkpoint.open(path), dtype, products=products)
    assert loaded.files is not None
    policy = build_policy("lru", loaded.spec, {}, slots) if seed is None else RandomPolicy(loaded.spec, slots, seed)
    store = ExpertStore(loaded.files, slots)
    runtime = ExpertRuntime(loaded, Residency(policy), store)
    made, cache = [], None
    try:
        with torch.inference_mode():
            for number, ids in enumerate([[5, 77, 1210, 9, 400, 3, 871], [12], [905], [31]]):
                begun = 6 + number if number else 0
                info = ForwardInfo(
                    forward_id=number,
                    request_T=(0,) * len(ids),
                    phase_T=(Phase.DECODE if number else Phase.PREFILL,) * len(ids),
                    position_T=tuple(range(begun, begun + len(ids))),
                )
                runtime.begin_forward(info)
                output = loaded.model(torch.tensor([ids]) % vocabulary, past_key_values=cache, use_cache=True)
                runtime.end_forward()
                cache = output.past_key_values
                made.append(output.logits[0])
        matrices = [weight for weight in store.ready(3, 0) if not isinstance(weight, torch.Tensor) or weight.dim() == 2]
        assert all(isinstance(weight, kept) for weight in matrices) == (products and dtype == torch.bfloat16)
        return torch.cat(made)
    finally:
        runtime.close()
        loaded.files.shards.close()


def require_near(whole: torch.Tensor, twin: Path, kinds: Sequence[str] = ("eager", "grouped_mm")) -> None:
    """Require errors against the dense model of at most twice those of transformers in bfloat16.

    Args:
        kinds: transformers' implementations of experts that the family has.
    """
    tokens = torch.tensor([[5, 77, 1210, 9, 400, 3, 871]]) % 64
    logits = {}
    for kind, dtype in (("eager", torch.float32), *((kind, torch.bfloat16) for kind in kinds)):
        theirs = load_full(Checkpoint.open(twin), dtype).model
        theirs.set_experts_implementation(kind)
        with torch.inference_mode():
            logits[kind, dtype] = theirs(tokens, use_cache=False).logits[0].float()
    exact = logits.pop(("eager", torch.float32))
    bound = 2 * max(float((made - exact).norm()) for made in logits.values())
    assert float((whole[:7].float() - exact).norm()) < bound
