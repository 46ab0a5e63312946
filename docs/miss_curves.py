"""Compute `data/miss_curves.json` from public routes: `python docs/miss_curves.py TRACE...`.

The traces are the published routes of three models, imported one by one:

    moetool trace import law.parquet --out deepseek-v2-lite     # deepseek-ai/ESFT
    moetool trace import mmlu_test.parquet --out gpt-oss-20b    # AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting
    moetool trace import qwen.route.csv --out qwen3-30b-a3b     # Helldez/BigMoeOnEdge, one conversation

A curve has the loads per needed expert of the policy that `moetool serve` begins with, by the share of the experts that
have slots. The first requests with about 4,096 tokens are replayed one after the other; the first quarter of their
tokens fills the slots and counts in no figure.
"""

import json
import sys
from pathlib import Path
from typing import Any

from moetool.base import assets
from moetool.bench.policy_table import first_requests
from moetool.trace.reader import Trace
from moetool.tuning.replay import ReplaySetup, replay

POLICY, POOL, TOKENS, WARM = "foresight", "layer", 4096, 0.25
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)


def curve(path: Path) -> dict[str, Any]:
    """The curve of one trace, with both ends: no slots, and every expert in a slot."""
    trace = Trace(path)
    spec = trace.spec
    requests, total = first_requests(trace, TOKENS)
    setup = ReplaySetup(requests=requests, warm_tokens=round(WARM * total), pool=POOL, pool_unit="slots")
    budgets = [round(share * spec.total_experts) * spec.slot_bytes for share in SHARES]
    rows = replay(trace, [POLICY], budgets, setup)
    loads = [round(row.decode.loads / row.decode.needed, 4) for row in sorted(rows, key=lambda row: row.budget_bytes)]
    return {
        "model": path.name,
        "num_experts": spec.num_experts_L[0],
        "top_k": spec.top_k_L[0],
        "tokens": total,
        "shares": [0.0, *SHARES, 1.0],
        "loads": [1.0, *loads, 0.0],
    }


if __name__ == "__main__":
    made = {"policy": POLICY, "pool": POOL, "curves": [curve(Path(name)) for name in sys.argv[1:]]}
    file = assets.path("data") / "miss_curves.json"
    file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
