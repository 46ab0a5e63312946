"""Time of layers without experts: the whole layer counts, and the model stays as it was."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import MoetoolError
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from moetool.models.transformers_internals import attention_of
from moetool.runtime.kv.latents import is_unexpanded
from moetool.runtime.layer_time import layer_seconds
from tests import families
from tests.refusals import refused

SLOW_S = 5e-3


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next", "llama4_text"])
def test_a_layer_takes_as_long_as_its_parts(name: str, tmp_path: Path) -> None:
    """In pages, as latents, with a request's own cache, and with experts that receive scaled inputs."""
    families.require_known(name)
    families.save(name, tmp_path)
    with closing(load_lazy(Checkpoint.open(tmp_path), torch.float32)) as loaded:

        def slowly(module: Any, args: Any, output: Any) -> None:
            time.sleep(SLOW_S)

        attention = attention_of(loaded.model)
        hooks = [layer.router.register_forward_hook(slowly) for layer in loaded.layers]
        assert layer_seconds(loaded) >= SLOW_S
        for hook in hooks:
            hook.remove()
        assert attention_of(loaded.model) == attention
        assert not any(is_unexpanded(module) for module in loaded.model.modules())


def test_a_step_that_fails_is_refused_with_a_way_out(tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path)
    with closing(load_lazy(Checkpoint.open(tmp_path), torch.float32)) as loaded:

        def fail(module: Any, args: Any, output: Any) -> None:
            raise RuntimeError("no kernel")

        attention = attention_of(loaded.model)
        loaded.layers[0].router.register_forward_hook(fail)
        with refused(MoetoolError, "no kernel", "host_compute=off"):
            layer_seconds(loaded)
        assert attention_of(loaded.model) == attention
