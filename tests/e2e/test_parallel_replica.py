"""The quantized replica predicts what ranks in threads wait to run, while they run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.base.types import ModelSpec
from moetool.cluster.parallel.batch_placement import BatchCosts, BatchReplacement, Waiting
from moetool.cluster.parallel.rank_head import RankedModel, RankHead
from moetool.cluster.parallel.rank_options import HeadOptions, RankOptions
from moetool.cluster.parallel.startup import open_predictors
from moetool.models.checkpoint import Checkpoint
from moetool.placement.decide import Decision
from moetool.training.quantize.calibration import Calibration
from moetool.training.quantize.replica import make_replica
from moetool.training.quantize.replica_layers import ReplicaOptions
from tests import families
from tests.ranks import Answers, ThreadRanks, cluster_of, held, striped

GPUS, SEATS = 2, 2
DRAW = torch.Generator().manual_seed(5)


class Watched(BatchReplacement):
    """Keeps what it was asked, and what the predictor said of it."""

    def __init__(self, spec: ModelSpec, folders: Sequence[Path]) -> None:
        predictors = open_predictors([str(folder) for folder in folders], spec)
        super().__init__("proactive", spec, cluster_of(spec, GPUS, 64), predictors=predictors, always=True)
        self.asked: list[list[Waiting]] = []
        self.demands_GLE: list[np.ndarray] = []

    def decide(self, batch: Sequence[Waiting], placed_GLE: np.ndarray, costs: BatchCosts) -> Decision | None:
        self.asked.append(list(batch))
        self.demands_GLE.append(self.predictors[0].demand(self._spec, self._cluster, batch)[0])
        return super().decide(batch, placed_GLE, costs)


@dataclass
class Made:
    """A tiny model and its replica."""

    model: Path
    replica: Path
    spec: ModelSpec


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("replica")
    families.save("qwen3_moe", folder / "model")
    text = Calibration(
        ids_NS=torch.randint(3, 64, (4, 24), generator=DRAW), judged_NS=torch.randint(3, 64, (2, 24), generator=DRAW)
    )
    make_replica(
        Checkpoint.open(folder / "model"), folder / "replica", text, ReplicaOptions(group=16, grid=2, min_tokens=4)
    )
    return Made(folder / "model", folder / "replica", Checkpoint.open(folder / "model").spec)


@pytest.fixture(scope="module")
def head(made: Made) -> Iterator[RankHead]:
    cluster = cluster_of(made.spec, GPUS, 64)
    opened = RankHead(
        RankedModel(name=str(made.model), spec=made.spec, tokenizer=None, vocab_size=64),
        cluster,
        striped(made.spec, GPUS),
        BatchReplacement("offline", made.spec, cluster),
        ThreadRanks(),
        rank_options=RankOptions(dtype="float32", kv_tokens=256, threads=1, seats=SEATS),
        options=HeadOptions(gather_s=0.2, patience_s=60.0),
    )
    opened.start()
    yield opened
    opened.close()


def _ask(head: RankHead, prompts: Sequence[list[int]]) -> list[list[int]]:
    answers = Answers(head)
    with held(head):
        requests = [answers.ask(prompt, 3, ignore_eos=True) for prompt in prompts]
    found = answers.wait(requests)
    head.wait_idle()
    return found


def test_the_replica_says_what_the_next_batch_will_use_and_no_text_changes(head: RankHead, made: Made) -> None:
    prompts = [torch.randint(3, 64, (20 + n,), generator=DRAW).tolist() for n in range(3 * GPUS * SEATS)]
    calm = _ask(head, prompts)
    control = Watched(made.spec, [made.replica])
    head.use(control, striped(made.spec, GPUS))
    assert _ask(head, prompts) == calm
    assert [decision.saw for decision in head.decisions] == ["awq_replica"] * 2  # for every batch but the first
    assert sum(record.moved_bytes for record in head.batches) > 0
    assert sum(record.moved_during_exchange for record in head.batches) == 0
    size = GPUS * SEATS
    for number, (batch, demand_GLE, record) in enumerate(
        zip(control.asked, control.demands_GLE, head.batches[1:], strict=True), 1
    ):
        assert [list(one.prompt) for one in batch] == prompts[number * size : (number + 1) * size]
        assert [one.gpu for one in batch] == [0, 1, 0, 1] and {one.new_tokens for one in batch} == {3}
        tokens_GL = record.tokens_GLE.sum(axis=2, keepdims=True)
        even_GLE = np.broadcast_to(tokens_GL / made.spec.num_experts, record.tokens_GLE.shape)
        predicted_GLE = demand_GLE * tokens_GL / demand_GLE.sum(axis=2, keepdims=True)
        missed, missed_by_none = (np.abs(x - record.tokens_GLE).sum() for x in (predicted_GLE, even_GLE))
        assert missed < 0.5 * missed_by_none


def test_what_the_replica_takes_is_measured_before_anybody_waits_for_it(made: Made) -> None:
    (predictor,) = open_predictors([str(made.replica)], made.spec)
    batch = [Waiting(prompt=[5] * 20, new_tokens=1, gpu=0)]
    assert predictor.token_s > 0 and predictor.cost_s(batch) == pytest.approx(20 * predictor.token_s)
    before_s, (_, taken_s) = predictor.token_s, predictor.demand(made.spec, cluster_of(made.spec, GPUS, 64), batch)
    assert predictor.token_s == pytest.approx((before_s + taken_s / 20) / 2)
    assert predictor.cost_s(batch * 3) == pytest.approx(3 * predictor.cost_s(batch))
