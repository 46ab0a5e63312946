"""Timings of one routed expert, and the gain of bfloat16 on this machine."""

import time
from functools import partial

import torch
import torch.nn.functional as F

from moetool.costing.costs import Curve
from moetool.measuring.probes.repeat import Timings, repeat
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.experts.expert_form import ExpertForm
from moetool.models.experts.stored_expert import Weight

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_COLD_BYTES = 256 * 10**6  # more than the caches of most processors hold


def expert_curve(
    form: ExpertForm,
    hidden: int,
    weights_dtype: torch.dtype,
    dtype: torch.dtype,
    device: str,
    seconds: float,
    files: ExpertFiles | None = None,
) -> Curve:
    """Return the seconds of one expert against its tokens, gather and scatter included.

    The weights are random, since values do not change the time. Several experts take turns, as in a model, so that CPU
    caches do not shorten the time.

    Args:
        form: matrices and activation of the layer's experts.
        hidden: width of input and output.
        weights_dtype: data type of the checkpoint; products convert the weights to `dtype` if different.
        files: files of packed experts, which are unpacked for each product.
    """
    expert_bytes = form.num_elements * weights_dtype.itemsize if files is None else files.slot_bytes
    copies = min(form.num_experts, max(2, _COLD_BYTES // expert_bytes))
    weights: list[tuple[Weight, ...]]
    if files is None:
        weights = [tuple(random(weights_dtype, device, *part.shape) for part in form.parts) for _ in range(copies)]
    else:
        slots = [torch.empty(files.slot_bytes, dtype=torch.uint8) for _ in range(copies)]
        for expert, slot in enumerate(slots):
            files.read_into(expert, slot)
        weights = [files.views(slot.to(device)) for slot in slots]
    timings = Timings()
    turn = 0

    def measure(tokens: int) -> None:
        nonlocal turn
        turn += 1
        x, products = random(dtype, device, tokens, hidden), random(dtype, device, tokens, hidden)
        rows = torch.arange(tokens, device=device)
        synchronize(device)
        began = time.perf_counter()
        products[rows] = form.compute(x[rows], weights[turn % copies])
        synchronize(device)
        timings.add(tokens, time.perf_counter() - began)

    with torch.inference_mode():
        repeat([partial(measure, tokens) for tokens in TOKENS], seconds)
    return timings.curve()


def bfloat16_gain(tokens: int, hidden: int = 2048, inner: int = 1408, rounds: int = 25) -> float:
    """Return the speed of a product [tokens, hidden] x [hidden, inner] in bfloat16 over float32, on one CPU thread.

    The fastest of several rounds counts, to limit the effect of other processes.
    """
    dtypes = (torch.float32, torch.bfloat16)
    seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in dtypes}
    factors = {dtype: (random(dtype, "cpu", tokens, hidden), random(dtype, "cpu", inner, hidden)) for dtype in dtypes}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(rounds):
        for dtype, (x, weight) in factors.items():
            began = time.perf_counter()
            F.linear(x, weight)
            seconds[dtype].append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return min(seconds[torch.float32]) / min(seconds[torch.bfloat16])


def random(dtype: torch.dtype, device: str, *shape: int) -> torch.Tensor:
    """Return random values at the scale of weights and activations."""
    return torch.randn(shape, device=device).mul_(0.02).to(dtype)


def synchronize(device: str) -> None:
    """Wait for the device's queued work."""
    if device == "cuda":
        torch.cuda.synchronize()
