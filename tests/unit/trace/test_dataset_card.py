"""The dataset card of a trace: read by the hub's own library, and true of the files beside it."""

from pathlib import Path

import pyarrow.parquet as pq
from huggingface_hub import DatasetCard

from moetool.trace.dataset_card import CARD, MEANINGS
from moetool.trace.rows import COLUMNS
from moetool.trace.schemas import REQUESTS
from tests import traces

LENGTHS = [(5, 4), (3, 2)]


def test_the_card_is_the_hubs_and_lists_every_column(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "t", traces.alone(LENGTHS), LENGTHS)
    card = DatasetCard.load(tmp_path / "t" / CARD)
    assert card.data.tags == ["mixture-of-experts", "routing", "moetool"]
    configs = {config["config_name"]: config["data_files"] for config in card.data.to_dict()["configs"]}
    assert all(list((tmp_path / "t").glob(pattern)) for pattern in configs.values())
    (file,) = (tmp_path / "t").glob(configs["tokens"])
    for field in pq.read_schema(file):
        width = f"[{field.type.list_size}]" if hasattr(field.type, "list_size") else ""
        kind = field.type.value_type if width else field.type
        kind = {"halffloat": "float16", "float": "float32"}.get(str(kind), str(kind))
        assert f"| `{field.name}` | {kind}{width} |" in card.text
    assert f"{trace.num_tokens:,} forwarded tokens of 2 requests" in card.text
    trace.verify()


def test_every_column_of_the_schema_has_a_meaning() -> None:
    assert set(MEANINGS) == {*COLUMNS, "embeddings", "text"}


def test_the_schema_page_lists_every_column() -> None:
    page = (Path(__file__).parents[3] / "moetool" / "guide" / "traces.md").read_text(encoding="utf-8")
    for name, (kind, meaning) in MEANINGS.items():
        bare = kind.replace("{", "").replace("}", "")
        assert f"| `{name}` | {bare} | {meaning.replace('{ahead}', 'A')} |" in page
    assert all(f"`{field.name}`" in page for field in REQUESTS)
