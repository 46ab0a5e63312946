"""Draw README's chart: `python docs/draw.py`.

`memory.json` has the rows of

    moetool trace import intent.parquet law.parquet translation.parquet --out routes      # published by DeepSeek, ESFT
    moetool trace split routes --by request --share 0.5 --out parts
    moetool train next_use --trace parts/0 --out next_use
    moetool trace sample parts/1 --requests 12 --out held
    moetool replay --trace held --policy lru,lfu,foresight,belady --predictor next_use
                   --budget 6.25%,12.5%,25%,37.5%,50%,75% --json
"""

import json
from pathlib import Path
from typing import Any

from moetool.report import drawing
from moetool.report.figures import memory_curves

HERE = Path(__file__).parent
NAMES = {"lfu": "lfu", "lru": "lru", "foresight": "foresight (ours)", "belady": "belady: the bound without prefetching"}


def memory(figure: Any) -> None:
    """Gigabytes loaded for each new token, and hit rate, against the memory that experts have."""
    rows = json.loads((HERE / "memory.json").read_text())
    memory_curves.paint(figure, rows, NAMES, ("GB", 1e9), "DeepSeek-V2-Lite in bfloat16: 28.8 GB of experts")


if __name__ == "__main__":
    drawing.save(HERE / "memory.svg", 3.2, memory)
