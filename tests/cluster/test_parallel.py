"""Expert parallelism on Ray's workers: a rank that is killed or hangs, with requests under way."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from moetool.cluster.launch import Where
from moetool.cluster.parallel.control import Control
from moetool.cluster.parallel.head import Head
from moetool.cluster.parallel.launching import RayRanks
from tests.ranks import Answers, open_head, striped

pytestmark = pytest.mark.ray
GPUS = 3


@pytest.fixture(scope="module")
def head(reference: Path, tokenizer: Any) -> Iterator[Head]:
    """Three ranks, each a process."""
    launcher = RayRanks(Where(count=GPUS), [f"rank {n}" for n in range(GPUS)], threads=1)
    made = open_head(reference, tokenizer, gpus=GPUS, launcher=launcher, seats=2, timeout_s=4.0)
    yield made
    made.close()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_is_lost_under_load(head: Head, tokenizer: Any, sign: signal.Signals) -> None:
    deadline = time.monotonic() + 120
    while head.metrics()["ranks"] < GPUS:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    head.settle()
    head.use(Control("offline", head.spec, head.cluster), striped(head.spec, GPUS))
    prompts = [tokenizer(text)["input_ids"] for text in ("The capital of", "def add(a, b):", "12 + 30 =", "Once upon")]
    answers = Answers(head)
    calm = answers.wait([answers.ask(prompt, 30) for prompt in prompts])
    answers.tokens.clear()
    generation = head._batches.ranks.generation
    requests = [answers.ask(prompt, 30) for prompt in prompts]
    answers.wait_for_tokens(12)
    launcher = head._launcher
    assert isinstance(launcher, RayRanks)
    lost = time.monotonic()
    os.kill(launcher.pid(1), sign)
    tokens = answers.wait(requests, timeout_s=120)
    assert tokens == calm and {answers.ends[request].finish for request in requests} <= {"length", "stop"}
    joined = [at for number, at in head._batches.ranks.joined.items() if number > generation]
    print(f"{sign.name}: the next generation was complete after {joined[0] - lost:.2f} s")
    assert joined[0] - lost < 10
