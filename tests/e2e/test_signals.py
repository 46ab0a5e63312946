"""A policy sees the same signals in serving and in a replay of the log, to the bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.types import ForwardInfo, GateEvent
from moetool.caching.policies import lru
from moetool.capture.run import CaptureOptions, capture
from moetool.models.checkpoint import Checkpoint
from moetool.prompts.gather import Prompt
from moetool.runtime.request import SamplingParams
from moetool.trace.reader import Trace
from tests.engines import engine
from tests.traces import SPEC

NEEDS = frozenset({"experts", "weights", "logits", "hidden", "ahead", "embeddings"})
TEXTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said"]


class Watching(lru.Policy):
    """LRU that keeps everything that it was told."""

    needs = NEEDS
    prefetch_distance = 2

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.forwards: list[ForwardInfo] = []
        self.events: list[GateEvent] = []

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        self.forwards.append(info)
        return ()

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self.events.append(event)
        return super().gate(event, hits, misses)


def test_serve_shows_a_policy_what_its_log_shows(reference: Path, tokenizer: Any, tmp_path: Path) -> None:

    policy = Watching(Checkpoint.open(reference).spec, None, 60)
    made = engine(reference, tokenizer, policy, 60, log=tmp_path / "log")
    for text in TEXTS:
        made.submit(tokenizer(text)["input_ids"], SamplingParams(max_tokens=5), lambda output: None)
        made.step()
    while not made.idle:
        made.step()
    made.close()
    trace = Trace(tmp_path / "log")
    assert trace.columns >= NEEDS and trace.ahead == 2
    seen = 0
    for (info, events), live in zip(
        trace.forwards(sequential=False, columns=NEEDS - {"experts"}), policy.forwards, strict=True
    ):
        assert np.array_equal(info.embedding_TD, live.embedding_TD)
        for event in events:
            shown = policy.events[seen]
            seen += 1
            assert (event.layer, event.experts_TK) == (shown.layer, shown.experts_TK)
            for name in ("weights_TK", "scores_TE", "hidden_TD", "ahead_ATE"):
                replayed, served = getattr(event, name), getattr(shown, name)
                assert served is not None and np.array_equal(replayed, served), name
    assert seen == len(policy.events) > 50


def test_looking_ahead_at_the_last_layers_and_the_true_distance(reference: Path, tmp_path: Path) -> None:
    prompts = [Prompt(dataset="d", task="t", prompt_id=str(i), text=text) for i, text in enumerate(TEXTS)]
    options = CaptureOptions(
        max_new_tokens=3, keep=("topk", "logits", "hidden", "ahead"), ahead=3, dtype="float32", batch_size=1
    )
    capture("reference", prompts, tmp_path / "trace", options)
    trace = Trace(tmp_path / "trace")
    spec = trace.spec
    right = total = 0
    for _, events in trace.forwards(sequential=True, columns=["logits", "ahead"]):
        for event in events:
            assert event.ahead_ATE is not None
            assert len(event.ahead_ATE) == min(3, spec.num_layers - 1 - event.layer)
            if len(event.ahead_ATE):
                guessed = np.argsort(-event.ahead_ATE[0], axis=1)[:, : spec.top_k_L[0]]
                following = events[event.layer + 1].experts_TK
                right += sum(len(set(g) & set(f)) for g, f in zip(guessed.tolist(), following, strict=True))
                total += len(following) * spec.top_k_L[0]
    assert right / total > 0.3  # by chance: 4 of 32


def test_embeddings_of_a_replay_are_means_over_the_iteration(tmp_path: Path) -> None:
    from tests import traces

    lengths = [(4, 3), (2, 2)]
    trace = traces.write(tmp_path / "trace", traces.together(lengths), lengths)
    for sequential in (True, False):
        for info, _ in trace.forwards(sequential=sequential, columns=["embeddings"]):
            assert info.embedding_TD is not None and info.embedding_TD.shape[1] == SPEC.hidden_size
            for request, phase, position, row in zip(
                info.request_T, info.phase_T, info.position_T, info.embedding_TD, strict=True
            ):
                iteration = position - lengths[request][0] + 1 if phase else 0
                assert row == pytest.approx(request + iteration / 8)
