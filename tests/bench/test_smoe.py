"""SMoE with and without shared experts: hits, loads and wasted prefetches, live on generated models.

    python -m pytest tests/bench/test_smoe.py -m '' -s

Nothing is timed. `moetool bench paper smoe` has the embedded model by alpha and part by part.
"""

from pathlib import Path
from typing import Any

import pytest

from moetool.base.tables import print_table
from moetool.models.checkpoint import Checkpoint
from tests import families
from tests.engines import engine, generate

PARTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("lru", "lru", {}),
    ("smoe, alpha 0, no prefetch", "smoe", {"alpha": 0.0, "prefetch": False}),
    ("smoe, alpha 0, later gates", "smoe", {"alpha": 0.0}),
    ("smoe, alpha 0, partial forward", "smoe", {"alpha": 0.0, "predict_from": "resident"}),
    ("smoe, alpha 0.3, later gates", "smoe", {"alpha": 0.3}),
    ("smoe, alpha 0.3, partial forward", "smoe", {"alpha": 0.3, "predict_from": "resident"}),
)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_with_and_without_shared_experts(family: str, tmp_path: Path) -> None:
    """Softmax and no shared expert, then sigmoid scores and a shared expert."""
    wide = {"hidden_size": 96, "num_hidden_layers": 7, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 32)
    families.save(family, tmp_path / "model", **wide, **experts, n_shared_experts=int(family != "qwen3_moe"))
    spec = Checkpoint.open(tmp_path / "model").spec
    assert (spec.num_experts, spec.top_k_L[0]) == (32, 4) and (family == "qwen3_moe") == (spec.num_shared_experts == 0)
    prompts = [[(17 * i * i + 7 * n) % 60 + 3 for i in range(12 + n)] for n in range(6)]
    rows = []
    for title, policy, options in PARTS:
        cells = []
        for share in (0.25, 0.5):
            made = engine(
                tmp_path / "model", None, policy, int(share * spec.total_experts), max_requests=1, options=options
            )
            answers, _ = generate(made, prompts, 24)
            counts, tokens = made.residency.decode, sum(map(len, answers)) - len(prompts)
            made.close()
            cells += [
                f"{counts.hit_rate:.3f}",
                f"{counts.loads / tokens:.2f}",
                f"{counts.wasted / max(1, counts.prefetch_loads):.2f}",
            ]
        rows.append([title, *cells])
    names = ["hits", "loads a token", "wasted"]
    shared = f"{spec.num_shared_experts} shared, {spec.score_function}"
    print_table(f"{family} ({shared}): 25 %, then 50 % of {spec.total_experts} experts", ["live", *names, *names], rows)
