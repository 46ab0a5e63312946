"""Open-loop load: requests arrive independently of earlier answers."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetool.base.errors import MoetoolError
from moetool.capture.remote import RemoteServer

_GIVE_UP_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """A scheduled request.

    Attributes:
        at_s: seconds after the start.
        server: server at which it arrives.
        task: task of its prompt.
        prompt: index of its prompt.
    """

    at_s: float
    server: int
    task: int
    prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A finished request.

    Attributes:
        seconds: from its arrival to its answer.
        went_to: the server that answered.
        text: None: it failed.
    """

    coming: ScheduledRequest
    seconds: float
    went_to: int
    text: str | None


def draw(
    requests: int, gap_s: float, prompts: Sequence[int], rng: np.random.Generator, task_of: Sequence[int] | None = None
) -> list[ScheduledRequest]:
    """Schedule requests at each server as independent Poisson processes; prompts in random order.

    Args:
        prompts: number of prompts per task.
        task_of: task of each server (default: its own number).
    """
    coming = []
    for server in range(len(prompts)):
        task = server if task_of is None else task_of[server]
        order = np.concatenate([rng.permutation(prompts[task]) for _ in range(-(-requests // prompts[task]))])
        times = np.cumsum(rng.exponential(gap_s, requests)).tolist()
        coming += [
            ScheduledRequest(at_s=at_s, server=server, task=task, prompt=int(prompt))
            for at_s, prompt in zip(times, order.tolist(), strict=False)
        ]
    return sorted(coming, key=lambda one: (one.at_s, one.server))


def drive(
    urls: Sequence[str],
    coming: Sequence[ScheduledRequest],
    texts: Sequence[Sequence[str]],
    new_tokens: int,
    *,
    model: str,
    redirect: bool = False,
) -> list[FinishedRequest]:
    """Send every request when it arrives, and wait for all answers.

    Args:
        urls: by server.
        texts: prompts by task.
        redirect: send a request to the server with the fewest unfinished ones, its own on a tie.
    """
    running = [0] * len(urls)
    lock = threading.Lock()
    answered: list[FinishedRequest] = []
    threads = []
    began = time.monotonic()
    for one in coming:
        time.sleep(max(0.0, began + one.at_s - time.monotonic()))
        with lock:
            goes_to = min(range(len(urls)), key=lambda n: (running[n], n != one.server)) if redirect else one.server
            running[goes_to] += 1

        def send(one: ScheduledRequest = one, goes_to: int = goes_to) -> None:
            text = _ask(urls[goes_to], model, texts[one.task][one.prompt], new_tokens)
            seconds = time.monotonic() - began - one.at_s
            with lock:
                running[goes_to] -= 1
                answered.append(FinishedRequest(coming=one, seconds=seconds, went_to=goes_to, text=text))

        threads.append(threading.Thread(target=send, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(_GIVE_UP_S)
    return answered


def warm(urls: Sequence[str], model: str, text: str) -> None:
    """Send one short request to every server, because the first is always slower."""
    for url in urls:
        _ask(url, model, text, 2)


def _ask(url: str, model: str, text: str, new_tokens: int) -> str | None:
    body = {"model": model, "prompt": text, "max_tokens": new_tokens, "temperature": 0}
    try:
        answer = RemoteServer(url=url, timeout_s=_GIVE_UP_S).ask("/v1/completions", body)
        return str(answer["choices"][0]["text"])
    except (MoetoolError, LookupError, TypeError):
        return None
