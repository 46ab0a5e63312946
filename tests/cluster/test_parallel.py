"""Expert parallelism on workers in processes: a rank that is killed or hangs, with requests under way."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moetool.cluster.launch import ClusterAddress
from moetool.cluster.parallel.batch_placement import BatchReplacement
from moetool.cluster.parallel.rank_head import RankHead
from moetool.cluster.parallel.rank_launch import RankProcesses
from tests.ranks import Answers, joined_after, open_head, striped
from tests.servers import eventually

pytestmark = pytest.mark.ray
GPUS = 3


@pytest.fixture(scope="module")
def head(reference: Path, tokenizer: Any) -> Iterator[RankHead]:
    """Three ranks, each a process."""
    launcher = RankProcesses(ClusterAddress(count=GPUS), [f"rank {n}" for n in range(GPUS)], threads=1)
    made = open_head(reference, tokenizer, gpus=GPUS, launcher=launcher, seats=2, timeout_s=4.0)
    yield made
    made.close()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_is_lost_under_load(head: RankHead, tokenizer: Any, sign: signal.Signals) -> None:
    eventually(lambda: head.metrics()["ranks"] == GPUS, within_s=120)
    head.wait_idle()
    head.use(BatchReplacement("offline", head.spec, head.cluster), striped(head.spec, GPUS))
    prompts = [tokenizer(text)["input_ids"] for text in ("The capital of", "def add(a, b):", "12 + 30 =", "Once upon")]
    answers = Answers(head)
    calm = answers.wait([answers.ask(prompt, 60) for prompt in prompts], timeout_s=120)
    answers.tokens.clear()
    ranks, launcher = head.loop.ranks, head.launcher
    assert isinstance(launcher, RankProcesses)
    generation, pid = ranks.generation, launcher.pid(1)  # asked now, since the requests must not end meanwhile
    requests = [answers.ask(prompt, 60) for prompt in prompts]
    answers.wait_for_tokens(8)
    lost = time.monotonic()
    os.kill(pid, sign)
    tokens = answers.wait(requests, timeout_s=120)
    assert tokens == calm and {answers.ends[request].finish for request in requests} <= {"length", "stop"}
    eventually(lambda: joined_after(head, generation) is not None)
    joined = joined_after(head, generation)
    assert joined is not None
    print(f"{sign.name}: the next generation was complete after {joined - lost:.2f} s")
    assert joined - lost < 10
