"""A prompt reads each expert that it needs once, and a chat's next turn only those of its new tokens."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.automatic import choose
from moetool.runtime.budget import footprint
from moetool.runtime.loop.engine import Engine
from moetool.runtime.request import SamplingParams
from moetool.runtime.serve_options import ServeOptions
from tests import families

PROMPT = 2000
SHARE = 0.25


@pytest.fixture(scope="module", params=["reference", "deepseek_v2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reference: Path) -> Checkpoint:
    """The embedded model with a longer context, and a narrow one with the experts of DeepSeek-V2-Lite."""
    folder = tmp_path_factory.mktemp("long")
    if request.param == "deepseek_v2":
        experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 64)
        shape = {"num_experts_per_tok": 6, "num_hidden_layers": 4, "n_group": 1, "vocab_size": 512}
        families.save("deepseek_v2", folder, max_position_embeddings=4096, **shape, **experts)
    else:
        shutil.copytree(reference, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    for file in reference.glob("token*"):
        shutil.copy(file, folder)
    return Checkpoint.open(str(folder))


def _open(checkpoint: Checkpoint, *, prefix_caching: bool = True) -> Engine:
    """As `moetool serve` does, with memory for a quarter of the experts."""
    kv_tokens, model = PROMPT + 160, footprint(checkpoint, ServeOptions())
    slots = int(SHARE * model.num_experts)
    memory = model.dense_bytes + kv_tokens * model.kv_token_bytes + slots * model.slot_bytes
    values = {"device": "cpu", "dtype": "float32", "kv_tokens": kv_tokens, "warm_start": False}
    setup = choose(
        checkpoint, {**values, "prefix_caching": prefix_caching, "oracle_s": 0.0}, device_memory_bytes=memory
    )
    engine = build_engine(checkpoint, options=setup.options, policy=setup.policy, device_memory_bytes=setup.budget)
    assert abs(engine.store.num_slots - slots) <= 1 and setup.policy == "foresight"
    engine.state = "ready"
    return engine


def _text(engine: Engine, seed: int, num_tokens: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, engine.vocab_size, (num_tokens,), generator=draw).tolist()  # type: ignore[no-any-return]


def _ask(engine: Engine, prompt: list[int], max_tokens: int = 1) -> tuple[list[int], int, float]:
    """The answer, the distinct experts that the request's forwards needed, and how many were read for them."""
    answer: list[int] = []
    before, passed = engine.metrics()["bytes_read"], engine.runtime.window.passed
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.submit(prompt, params, lambda output: answer.append(output.token or 0))
    while not engine.idle:
        engine.step()
    forwards = engine.runtime.window.forwards()[passed - engine.runtime.window.passed :]
    distinct = {(event.layer, expert) for forward in forwards for event in forward.events for expert in event.needed}
    return answer, len(distinct), (engine.metrics()["bytes_read"] - before) / engine.store.files.slot_bytes


def test_a_long_prompt_reads_what_it_needs_once(checkpoint: Checkpoint) -> None:
    engine = _open(checkpoint)
    for seed in (1, 2):
        _, distinct, read = _ask(engine, _text(engine, seed, PROMPT))
        assert distinct > 0.9 * engine.spec.total_experts
        assert read <= (1.05 if seed == 1 else 0.8) * distinct  # the second finds what is resident
        _ask(engine, _text(engine, seed + 10, 20), max_tokens=8)
    engine.close()


def test_the_next_turn_reads_what_its_new_tokens_need_and_is_not_resident(checkpoint: Checkpoint) -> None:
    reads = {}
    for caching in (False, True):
        engine = _open(checkpoint, prefix_caching=caching)
        first = _text(engine, 1, PROMPT)
        answer, _, _ = _ask(engine, first, max_tokens=8)
        resident = set(engine.residency.slot_of)
        _, distinct, reads[caching] = _ask(engine, [*first, *answer, *_text(engine, 2, 8)])
        assert reads[caching] <= distinct - 0.75 * len(resident)
        engine.close()
    assert reads[True] < 0.7 * reads[False]
