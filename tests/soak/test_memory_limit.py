"""A checkpoint in a memory cgroup of a third of its size: the server starts, answers, and is never killed.

python -m pytest tests/soak/test_memory_limit.py -s
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moetool.bench.random_checkpoint import random_checkpoint
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.location import locate_config
from tests import servers
from tests.memory_group import MemoryGroup
from tests.server_process import served
from tests.servers import get, post

pytestmark = pytest.mark.slow
LAYERS = 5
PROMPTS = (10, 600, 1200, 200)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five MoE layers of DeepSeek-V2-Lite with the embedded model's vocabulary: 6 GB."""
    if given := os.environ.get("MOETOOL_TEST_CHECKPOINT"):
        return Path(given)
    folder = tmp_path_factory.mktemp("shape")
    reference = Checkpoint.open("reference")
    own = ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")
    shape = json.loads((Path(locate_config("deepseek-v2-lite")) / "config.json").read_text())
    shape |= {name: reference.raw[name] for name in own if name in reference.raw}
    (folder / "config.json").write_text(json.dumps(shape))
    path = random_checkpoint(str(folder), LAYERS, folder / "made")
    for file in reference.path.glob("token*"):
        shutil.copy(file, path)
    return path


def test_a_third_of_the_checkpoint_is_enough(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PATIENCE_S", 900.0)  # memory is measured here, on machines that others use too
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    group = MemoryGroup("moetool-limit")
    if not group.usable:
        pytest.skip("needs root, to make a memory cgroup")
    try:
        group.limit(size // 3)
        with served(str(checkpoint), "--device", "cpu", "--set", "warm_start=false", prefix=group.prefix) as server:
            for length in PROMPTS:
                prompt = [(i * 7919 + length) % 4000 + 5 for i in range(length)]
                ask = {"model": str(checkpoint), "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
                status, answer = post(server.url, "/v1/completions", ask)
                assert status == 200 and answer["usage"]["completion_tokens"] == 8, answer
            with ThreadPoolExecutor(4) as together:
                asked = [{**ask, "prompt": [(i * 31 + k) % 4000 + 5 for i in range(250)]} for k in range(4)]
                answers = list(together.map(lambda one: post(server.url, "/v1/completions", one), asked))
            assert [status for status, _ in answers] == [200] * 4, answers
            memory = json.loads(get(server.url, "/stats")[2])["engine"]["memory_bytes"]
            status_lines = Path(f"/proc/{server.popen.pid}/status").read_text().splitlines()
            peak = next(int(line.split()[1]) * 1024 for line in status_lines if line.startswith("VmHWM"))
            print(f"\n{size:,} bytes in {size // 3:,}: peak {peak:,}; {memory}\n{server.narration}")
            assert peak < size // 3 and memory["expert_slots"] > 0.1 * size / 3
            assert "free memory" in server.narration
            assert server.stop() == 0
    finally:
        group.close()
