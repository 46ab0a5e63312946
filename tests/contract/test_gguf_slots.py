"""Experts of GGUF files that stay in their blocks on a CPU: the numbers, tokens and bits that they give."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.kernels.cpu import many_rows, scaled_weight, vectors
from moetool.kernels.cpu.compiled import find_kernel
from moetool.kernels.cpu.kinds import BFLOAT16, GGML_KINDS, RowKind
from moetool.kernels.cpu.matmul import MAX_SCALED_ROWS, products
from moetool.kernels.cpu.scaled_weight import ScaledWeight, StackedWeight
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full
from tests.served_logits import require_near, served_logits

gguf = pytest.importorskip("gguf")
from tests.gguf_models import random_blocks, rewritten, written  # noqa: E402  # needs the package

pytestmark = pytest.mark.skipif(find_kernel(BFLOAT16) is None, reason="numba compiles no kernel here")
SIZE = {"width": 512, "moe_intermediate_size": 512, "vocab_size": 64}
FILES: dict[str, Mapping[str, str | tuple[str, ...]]] = {
    "q8_0": {"gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"},
    "q4_k_m": {"gate": "Q4_K", "up": "Q4_K", "down": ("Q6_K", "Q4_K")},
    "q4_0": {"gate": "Q4_0", "up": "Q4_0", "down": ("Q5_0", "Q4_0")},
    "q2_k": {"gate": "Q2_K", "up": "Q2_K", "down": ("Q3_K", "IQ4_XS")},
    "iq3_xxs": {"gate": "IQ3_XXS", "up": "IQ3_XXS", "down": ("IQ3_S", "IQ4_XS")},
    "iq2_xxs": {"gate": "IQ2_XXS", "up": "IQ2_XXS", "down": ("IQ3_XXS", "IQ2_S")},
    "iq1_s": {"gate": "IQ1_S", "up": ("IQ1_M", "IQ1_S"), "down": "IQ2_XS"},
    "tq1_0": {"gate": "TQ1_0", "up": "TQ2_0", "down": "TQ1_0"},
    "q4_0_q8_0": {"gate": "Q4_0", "up": "Q8_0", "down": "Q8_0"},
}
"""Types of experts by layer; gate and up may differ."""
KEPT = ScaledWeight | StackedWeight
GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"


def _weight(kind: RowKind, rows: int = 64, columns: int = 768) -> tuple[ScaledWeight, torch.Tensor]:
    """A weight of random blocks, and the numbers float32 that the gguf package reads in them."""
    quantized = gguf.GGMLQuantizationType(kind.ggml)
    blocks = random_blocks((rows, columns), quantized)
    weight = ScaledWeight(kind, torch.from_numpy(blocks), torch.empty(0), columns, kind.numbers, 1, False)
    return weight, torch.from_numpy(gguf.dequantize(blocks, quantized)).view(rows, columns)


@pytest.mark.parametrize("kind", GGML_KINDS, ids=lambda kind: kind.name)
def test_blocks_are_multiplied_as_the_numbers_of_the_gguf_package(kind: RowKind) -> None:
    """In float32, no weight rounded; unpacked, those numbers rounded to bfloat16; a row's bits hang on no other row."""
    weight, numbers = _weight(kind)
    x = torch.randn(MAX_SCALED_ROWS - 1, weight.columns, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ numbers.double().T
    (found,) = products([x], [weight])
    assert torch.allclose(found.double(), exact, rtol=0, atol=2e-6 * float(exact.abs().max()))
    assert torch.equal(weight.to(torch.bfloat16), numbers.bfloat16())
    for row in (0, 3, 6):
        assert torch.equal(products([x[row : row + 1]], [weight])[0][0], found[row])
    many = torch.randn(40, weight.columns).bfloat16()
    assert torch.equal(weight.times(many), many_rows.linear(many, numbers.bfloat16()))


@pytest.mark.parametrize("kind", [kind for kind in GGML_KINDS if kind.name.startswith("iq4")], ids=lambda k: k.name)
def test_processors_without_a_look_up_read_the_same_numbers(kind: RowKind, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, numbers = _weight(kind)
    monkeypatch.setattr(vectors, "has_features", lambda *names: False)
    monkeypatch.setattr(scaled_weight, "find_kernel", find_kernel.__wrapped__)  # beside the compiled ones
    assert torch.equal(weight.to(torch.bfloat16), numbers.bfloat16())


def test_rows_of_several_kinds_are_multiplied_as_those_of_each() -> None:
    weights = tuple(_weight(kind, 256, 1024)[0] for kind in GGML_KINDS if kind.name in ("iq2_xxs", "q4_k"))
    both = StackedWeight(weights)
    assert both.shape == (512, 1024)
    for rows, dtype in ((3, torch.float32), (40, torch.bfloat16)):
        x = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(rows)).to(dtype)
        assert torch.equal(both.times(x), torch.cat([weight.times(x) for weight in weights], dim=1))
        few = x[:MAX_SCALED_ROWS]
        expected = torch.cat([products([few], [weight])[0] for weight in weights], dim=1)
        assert torch.equal(products([few[:1], few], [both, both])[1], expected)
    assert torch.equal(both.to(torch.float32), torch.cat([weight.to(torch.float32) for weight in weights]))


@pytest.mark.parametrize("name", FILES)
def test_experts_stay_in_their_blocks(name: str, tmp_path: Path) -> None:
    """Slots take the stored bytes; no budget and no policy changes a bit; layers may have blocks of several types."""
    path, twin = written("qwen3_moe", tmp_path, FILES[name], **SIZE, num_experts=4)
    made = partial(served_logits, path, dtype=torch.bfloat16, products=True, vocabulary=64, kept=KEPT)
    whole = made(8)
    for slots, seed in ((5, None), (4, 2)):
        assert torch.equal(made(slots, seed=seed), whole)
    require_near(whole, twin)
    with Checkpoint.open(path) as checkpoint:
        packed, dense = (checkpoint.expert_files(fastest=dtype) for dtype in (torch.bfloat16, torch.float32))
        alone = Checkpoint.open(path, weights=False).slot_bytes(torch.bfloat16)
        assert packed.slot_bytes == checkpoint.slot_bytes(torch.bfloat16) == alone == packed.stored_bytes
        assert packed.slot_bytes <= 34 / 64 * 2 * checkpoint.layers[0].form.num_elements
        slot = torch.empty(packed.slot_bytes, dtype=torch.uint8)
        for layer in checkpoint.layers:
            key = checkpoint.spec.expert_key(layer.index, 1)
            assert packed.read_into(key, slot) == checkpoint.spec.expert_bytes_L[layer.index]
            expected = dense.stacked(layer, torch.float32)
            for parameter, found in packed.stacked(layer, torch.float32).items():
                assert torch.equal(found, expected[parameter].bfloat16().float())


@pytest.mark.parametrize("gate", ["Q8_0", "Q4_0"])
def test_flat_experts_stay_in_their_blocks(gate: str, tmp_path: Path) -> None:
    """Of DBRX, whose matrices of all experts lie below each other, those of down transposed."""
    draw, source = np.random.default_rng(2), GOLDEN / "dbrx.gguf"
    tensors: dict[str, np.ndarray | None] = {}
    for tensor in gguf.GGUFReader(source).tensors:
        rows, width = tensor.name in ("token_embd.weight", "output.weight"), {16: 512, 32: 512, 64: 1024}
        shape = [size if rows and size == 64 else width.get(size, size) for size in tensor.shape.tolist()[::-1]]
        tensors[tensor.name] = draw.normal(1 if "norm" in tensor.name else 0, 0.05, shape).astype(np.float32)
    values = {"dbrx.embedding_length": 512, "dbrx.feed_forward_length": 512}
    experts = {name: gate if "gate" in name else "Q8_0" for name in tensors if "_exps" in name}
    path = rewritten(source, tmp_path / "m.gguf", values, tensors, experts)
    made = partial(served_logits, path, dtype=torch.bfloat16, products=True, vocabulary=64, kept=KEPT)
    whole = made(8)
    assert torch.equal(made(5), whole)
    require_near(whole, path, ["eager"])
    with Checkpoint.open(path) as checkpoint:
        packed, dense = (checkpoint.expert_files(fastest=dtype) for dtype in (torch.bfloat16, torch.float32))
        alone = Checkpoint.open(path, weights=False).slot_bytes(torch.bfloat16)
        assert packed.slot_bytes == checkpoint.slot_bytes(torch.bfloat16) == alone == packed.stored_bytes
        expected = dense.stacked(checkpoint.layers[0], torch.float32)
        for parameter, found in packed.stacked(checkpoint.layers[0], torch.float32).items():
            assert torch.equal(found, expected[parameter].bfloat16().float())


@pytest.mark.parametrize("name", ["q4_k_m", "iq3_xxs", "iq2_xxs", "iq1_s"])
def test_tokens_are_those_of_the_model_that_the_file_stands_for(name: str, tmp_path: Path) -> None:
    """In bfloat16 ties are frequent, so the model is compared in its logits' order at each token of one text."""
    path, twin = written("qwen3_moe", tmp_path, FILES[name], **SIZE, num_experts=4)
    found = served_logits(path, 5, dtype=torch.bfloat16, products=True, vocabulary=64, kept=KEPT).float()
    theirs = load_full(Checkpoint.open(twin), torch.float32).model
    tokens = torch.tensor([[5, 77, 1210, 9, 400, 3, 871, 12, 905, 31]]) % 64
    with torch.inference_mode():
        expected = theirs(tokens, use_cache=False).logits[0]
    first, second = expected.topk(2).values.unbind(1)
    sure = first - second > 0.05 * expected.std()
    assert sure.sum() > 5 and torch.equal(found.argmax(1)[sure], expected.argmax(1)[sure])


@pytest.mark.parametrize(
    ("types", "kept"),
    [
        ({"gate": "F16", "up": "Q8_0", "down": "Q8_0"}, [torch.Tensor, ScaledWeight]),
        ({"gate": "NVFP4", "up": "NVFP4", "down": "NVFP4"}, [torch.Tensor, torch.Tensor]),
    ],
)
def test_blocks_without_a_kernel_are_unpacked(
    types: Mapping[str, str | tuple[str, ...]], kept: list[type], tmp_path: Path
) -> None:
    """Matrix by matrix; gate and up are one."""
    path, _ = written("qwen3_moe", tmp_path, types, **SIZE, num_experts=2, num_hidden_layers=1)
    with Checkpoint.open(path) as checkpoint:
        files, dense = (checkpoint.expert_files(fastest=dtype) for dtype in (torch.bfloat16, torch.float32))
        views = files.views(torch.empty(files.slot_bytes, dtype=torch.uint8))
        assert [type(view) for view in views] == kept
        expected = dense.stacked(checkpoint.layers[0], torch.float32)
        for parameter, found in files.stacked(checkpoint.layers[0], torch.bfloat16).items():
            assert torch.equal(found, expected[parameter].bfloat16())
