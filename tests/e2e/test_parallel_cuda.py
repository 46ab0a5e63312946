"""Expert parallelism over NCCL, with as many ranks as there are GPUs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moetool.cluster.parallel.process_group import Group
from moetool.cluster.parallel.rank_mesh import Arrivals, Mesh
from tests import engines
from tests.identities import identity
from tests.ranks import Answers, open_head, striped

pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@needs_gpu
def test_rows_travel_over_nccl() -> None:
    mesh = Mesh(1, 0, [(0, ("127.0.0.1", 0))], identity=identity("rank-0"), arrivals=Arrivals(), timeout_s=30.0)
    group = Group(mesh, store=dist.HashStore(), device=torch.device("cuda", 0))
    rows_XD = torch.arange(12.0, device="cuda").view(4, 3)
    assert torch.equal(group.exchange(rows_XD, [4], [4]), rows_XD)
    assert group.counts(np.array([[1, 2]])).tolist() == [[1, 2]]
    few, counts_RE = group.exchange_few(rows_XD, np.array([[1, 3]]), 4)
    assert torch.equal(few, rows_XD) and counts_RE.tolist() == [[1, 3]]
    begun = [group.begin_exchange(rows_XD + n, [4], [4]) for n in range(2)]
    assert all(torch.equal(arrived(), rows_XD + n) for n, arrived in enumerate(begun))
    group.abort()


@needs_gpu
@pytest.mark.parametrize(("times", "micro_batches"), [(1, 1), (40, 1), (40, 2)])
def test_ranks_on_gpus_give_one_gpus_text(times: int, micro_batches: int, reference: Path, tokenizer: Any) -> None:
    gpus = 1  # ranks in threads of one process share its first GPU, and NCCL wants one for each
    prompts = [tokenizer(text * times)["input_ids"] for text in ("The capital of France", "def add(a, b):")]
    engine = engines.engine(reference, tokenizer, "lru", 256, max_requests=2, device=torch.device("cuda", 0))
    expected, _ = engines.generate(engine, prompts, 8)
    engine.close()
    placed_GLE = striped(engine.spec, gpus)
    options: dict[str, Any] = {"seats": 2, "device": "cuda", "timeout_s": 60.0, "gather_s": 0.5}
    options["micro_batches"] = micro_batches
    head = open_head(reference, tokenizer, gpus=gpus, placed_GLE=placed_GLE, **options)
    try:
        answers = Answers(head)
        assert answers.wait([answers.ask(prompt, 8) for prompt in prompts]) == expected
    finally:
        head.close()
