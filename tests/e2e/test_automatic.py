"""`moetool serve MODEL` as a process: what it chooses, and what it says of it."""

import json

from moetool.models.checkpoint import Checkpoint
from moetool.runtime.automatic import choose
from tests.server_process import served
from tests.servers import get


def test_stats_have_the_settings_that_are_printed() -> None:
    with served("reference", "--device", "cpu", "--set", "kv_tokens=512") as process:
        settings = json.loads(get(process.url, "/stats")[2])["settings"]
        printed = process.narration
    assert {"device", "dtype", "memory", "KV cache", "prefill chunk"} <= {row["name"] for row in settings}
    assert {"name": "KV cache", "value": "512 tokens", "why": "as set"} in settings
    words = " ".join(printed.split())
    assert all(f"{row['name']} {row['value']} {row['why']}" in words for row in settings)


def test_a_plans_settings_name_the_plan() -> None:
    values, planned = {"device": "cpu", "dtype": "float32", "kv_tokens": 512}, ["kv_tokens", "memory", "policy"]
    made = choose(Checkpoint.open("reference"), values, device_memory_bytes=40_000_000, policy="lru", planned=planned)
    why = {name: reason for name, _, reason in made.choices}
    assert {why[name] for name in ("KV cache", "memory", "policy")} == {"the plan's"}
    assert why["device"] == why["dtype"] == "as set" != why["prefill chunk"]
