"""Expert parallelism on workers in processes: a rank that is killed, hangs or leaves, with requests under way."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from moetool.cluster.launch import ClusterAddress
from moetool.cluster.parallel.batch_placement import BatchReplacement
from moetool.cluster.parallel.rank_head import RankHead
from moetool.cluster.parallel.rank_launch import RankProcesses
from tests.ranks import Answers, joined_after, open_head, striped
from tests.servers import eventually, has_ended

pytestmark = pytest.mark.ray
GPUS = 3
PROMPTS = ("The capital of", "def add(a, b):", "12 + 30 =", "Once upon")


@pytest.fixture(scope="module")
def head(reference: Path, tokenizer: Any) -> Iterator[RankHead]:
    """Three ranks, each a process."""
    launcher = RankProcesses(ClusterAddress(count=GPUS), [f"rank {n}" for n in range(GPUS)], threads=1)
    made = open_head(reference, tokenizer, gpus=GPUS, launcher=launcher, seats=2, timeout_s=4.0)
    yield made
    made.close()


def _calm(head: RankHead, answers: Answers, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The tokens of all ranks' answers while none is lost."""
    eventually(lambda: head.metrics()["ranks"] == GPUS, within_s=120)
    head.wait_idle()
    head.use(BatchReplacement("offline", head.spec, head.cluster), striped(head.spec, GPUS))
    calm = answers.wait([answers.ask(prompt, 60) for prompt in prompts], timeout_s=120)
    answers.tokens.clear()
    return calm


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_is_lost_under_load(head: RankHead, tokenizer: Any, sign: signal.Signals) -> None:
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    answers = Answers(head)
    calm = _calm(head, answers, prompts)
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


def test_a_rank_that_is_asked_to_end_leaves_after_the_running_requests(head: RankHead, tokenizer: Any) -> None:
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    answers = Answers(head)
    calm = _calm(head, answers, prompts)
    launcher, before = head.launcher, head.metrics()
    assert isinstance(launcher, RankProcesses)
    process = psutil.Process(launcher.pid(1))
    requests = [answers.ask(prompt, 60) for prompt in prompts]
    answers.wait_for_tokens(8)
    process.terminate()
    late = [answers.ask(prompt, 60) for prompt in prompts]
    assert answers.wait([*requests, *late], timeout_s=120) == calm * 2
    eventually(lambda: has_ended(process))
    eventually(lambda: head.problems == ["GPU 1 has no machine; continuing without it"])
    after = head.metrics()
    assert after["ranks"] == GPUS - 1 and after["generation"] == before["generation"] + 1
    assert (after["requests_retried"], after["failures"]) == (before["requests_retried"], before["failures"])
    assert answers.wait([answers.ask(prompt, 60) for prompt in prompts], timeout_s=120) == calm
