"""Memory that prompt chunks borrow from expert slots, and what goes back to the system."""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moetool.base.config import parse
from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, Phase
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import CPU, load_lazy
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import open_store
from moetool.runtime.memory_share import MemoryShare, flexible_share
from moetool.runtime.returned_memory import release_pages, return_freed_memory, unchanged_mappings
from moetool.runtime.serve_options import ServeOptions
from moetool.runtime.sizing import LEAST_CHUNK, MOST_CHUNK, Footprint, divide
from tests.command_line import child_environment


def test_longer_chunks_borrow_more_and_never_less_than_their_activations() -> None:
    share = MemoryShare(slots=60, most_slots=30, chunk_tokens=2070)
    found = [share.slots_for_forward(tokens) for tokens in range(3000)]
    assert found == sorted(found)
    assert set(found[: LEAST_CHUNK + 1]) == {0} and found[LEAST_CHUNK + 1] > 0 and found[2070] == 30 < found[2999]
    assert len(set(found[:2071])) <= 17
    slot_tokens = (2070 - LEAST_CHUNK) / 30
    assert all((tokens - LEAST_CHUNK) / slot_tokens <= slots for tokens, slots in enumerate(found))
    assert MemoryShare(slots=60, chunk_tokens=64).slots_for_forward(3000) == 0


def test_returned_pages_are_no_longer_resident() -> None:
    memory, process = torch.ones(64 << 20, dtype=torch.uint8), psutil.Process()
    before = process.memory_info().rss
    release_pages(memory)
    assert before - process.memory_info().rss > 60 << 20
    assert int(memory[1 << 20]) == 0


_RELEASE = """
import psutil, torch
from moetool.runtime.returned_memory import release_code

torch.manual_seed(1)
a, b = torch.randn(64, 64), torch.randn(64, 64)
expected, process = (a @ b).tolist(), psutil.Process()

def resident_code():
    maps = [one for one in process.memory_maps(grouped=False) if ".so" in one.path]
    return [sum(one.rss for one in maps if one.perms == perms) for perms in ("r-xp", "r--p")]

before = resident_code()
release_code()
assert before[0] > 32 << 20 and resident_code()[0] < before[0] // 2
assert resident_code()[1] < before[1] - (1 << 20)
assert (a @ b).tolist() == expected
"""


def test_code_of_libraries_is_not_resident_until_it_runs_again() -> None:
    # In a process of its own: another test may have returned this one's.
    subprocess.run([sys.executable, "-c", _RELEASE], check=True, env=child_environment())


@pytest.mark.parametrize(
    ("access", "file", "anonymous", "swapped", "unchanged"),
    [
        ("r-xp", "/lib/libc.so.6", 0, 0, True),
        ("r--p", "/lib/libc.so.6", 0, 0, True),
        ("r--p", "/lib/libc.so.6", 8, 0, False),
        ("r--p", "/lib/libc.so.6", 0, 8, False),  # the pages that the loader wrote are swapped out
        ("rw-p", "/lib/libc.so.6", 0, 0, False),
        ("r--p", "/lib/locale-archive", 0, 0, False),
    ],
)
def test_only_mappings_that_equal_their_file_are_returned(
    access: str, file: str, anonymous: int, swapped: int, unchanged: bool
) -> None:
    lines = [
        f"7f0000000000-7f0000003000 {access} 00001000 08:01 42                         {file}",
        f"Anonymous:             {anonymous} kB",
        f"Swap:                  {swapped} kB",
        f"SwapPss:               {swapped} kB",
        "7f0000004000-7f0000005000 rw-p 00000000 00:00 0 ",
        "Anonymous:             0 kB",
    ]
    assert unchanged_mappings("\n".join(lines)) == [range(0x7F0000000000, 0x7F0000003000)] * unchanged


def test_few_compiled_products_are_kept_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    return_freed_memory()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    return_freed_memory()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "128"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs the GNU C library")
def test_activations_of_the_next_forward_touch_kept_pages() -> None:
    """Pages that a thread touches anew, and those resident after twelve threads' blocks of 8 MiB are freed."""
    touched = """
import ctypes, psutil, resource, threading
from moetool.runtime.returned_memory import return_freed_memory
library = ctypes.CDLL(None)
library.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
size, blocks, both = 8 << 20, [], threading.Barrier(12)
def forward(wait=lambda: None):
    block = library.malloc(size)
    ctypes.memset(block, 1, size)
    wait()
    library.free(block)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        forward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for kept in (0, 4 << 20, 16 << 20):
    return_freed_memory(kept)
    faults()
    print(faults())
before = psutil.Process().memory_info().rss
threads = [threading.Thread(target=forward, args=(both.wait,)) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print((psutil.Process().memory_info().rss - before) // size)
"""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    run = subprocess.run([sys.executable, "-c", touched], capture_output=True, text=True, check=True, env=environment)
    returned, too_small, kept, left = map(int, run.stdout.split())
    pages = 5 * (8 << 20) // mmap.PAGESIZE
    assert returned >= pages and too_small >= pages and kept < pages // 5 and left <= 3


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_released_slot_is_loaded_anew(prefetch: bool, reference: Path) -> None:
    with contextlib.closing(load_lazy(Checkpoint.open(reference), torch.float32, CPU)) as loaded:
        residency = Residency(build_policy("lru", loaded.spec, {}, 4))
        with contextlib.closing(open_store(loaded, residency)) as store:
            first = [part.clone() for part in store.ready(5, 2)]
            store.load(7, 2, prefetch=prefetch)
            store.release([2, 3])
            again = store.ready(5, 2)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
            assert not store.holds(7, 2)


@given(
    memory=st.integers(3 * 10**9, 60 * 10**9),
    num_experts=st.integers(64, 6144),
    chunk=st.booleans(),
    cache=st.booleans(),
    tokens=st.integers(1, 9000),
    grown=st.floats(0, 1),
    kv_tokens=st.integers(1024, 8192),
    token_bytes=st.integers(50_000, 3_000_000),
)
def test_the_memory_holds_what_is_lent_and_what_is_kept(
    memory: int, num_experts: int, chunk: bool, cache: bool, tokens: int, grown: float, kv_tokens: int, token_bytes: int
) -> None:
    model = Footprint(
        dense_bytes=1_000_000_000,
        slot_bytes=9_437_184,
        num_experts=num_experts,
        min_slots=2,
        kv_token_bytes=98_304,
        token_bytes=token_bytes,
        max_context=40_960,
        token_experts=384,
        context_bytes=4096,
    )
    split = divide(model, memory, kv_tokens=kv_tokens)
    share = flexible_share(model, split, chunk=chunk, cache=cache)
    borrowed, longest, first = share.most_slots, share.chunk_tokens, split.kv_tokens - share.kv_tokens
    beyond = int(grown * share.kv_tokens)
    slots = share.slots - share.slots_for_forward(min(tokens, longest)) - share.slots_for_cache(beyond)
    activations = max(share.first_chunk if borrowed else longest, min(tokens, longest))
    kv_bytes = (first + beyond) * (model.kv_token_bytes + model.context_bytes)
    assert max(model.min_slots, split.slots // 2) <= slots <= share.slots <= num_experts
    assert longest >= split.chunk_tokens
    assert model.dense_bytes + slots * model.slot_bytes + kv_bytes + activations * model.token_bytes <= memory
    whole = longest == min(MOST_CHUNK, split.kv_tokens)
    assert not chunk or whole or share.slots == num_experts or borrowed >= split.slots // 2 - 1


def test_small_experts_are_borrowed_by_short_prompts_too() -> None:
    """Activations of 256 tokens would take as much memory as 59 of 90 slots of the toy model."""
    toy = Footprint(
        dense_bytes=3_317_120,
        slot_bytes=73_728,
        num_experts=256,
        min_slots=2,
        kv_token_bytes=2048,
        token_bytes=16_896,
        max_context=4096,
        token_experts=32,
    )
    split = divide(toy, 12_000_000, kv_tokens=1024)
    share = flexible_share(toy, split, chunk=True, cache=False)
    assert share.first_chunk == 16 and share.most_slots > 50 and share.slots >= split.slots + 50
    large = flexible_share(replace(toy, token_bytes=100), split, chunk=True, cache=False)
    assert large.first_chunk == LEAST_CHUNK


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        *(("borrowed_slots", "prefill_chunk"), ("first_chunk", "prefill_chunk")),
        *(("first_kv_tokens", "kv_tokens"), ("kv_slots", "kv_tokens")),
        *(("change_policy", "--policy"), ("remember_policy", "--policy")),
    ],
)
def test_an_earlier_setting_is_refused_with_another(name: str, instead: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(ServeOptions, {name: 4}, "--set")
    assert f"--set: {name} " in str(refused.value) and f"set {instead}" in str(refused.value)


class _Large(TorchDispatchMode):
    """Collects the storages of tensors of at least this many bytes that operations make."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes = num_bytes
        self.made: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= self._num_bytes:
                self.made[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return made


def test_outputs_of_a_long_prompts_experts_are_held_once(reference: Path) -> None:
    """Neither gathered inputs nor weighted outputs of all choices take memory, and the sum is the same to the bit."""
    with contextlib.closing(load_lazy(Checkpoint.open(reference), torch.float32, CPU)) as loaded:
        residency = Residency(build_policy("lru", loaded.spec, {}, 8))
        runtime = ExpertRuntime(loaded, residency, open_store(loaded, residency))
        layer, num_tokens, draw = loaded.layers[0], 700, torch.Generator().manual_seed(1)
        hidden_TD = torch.randn(num_tokens, loaded.spec.hidden_size, generator=draw)
        index_TK = torch.rand(num_tokens, layer.num_experts, generator=draw).topk(layer.top_k).indices
        weights_TK = torch.rand(index_TK.shape, generator=draw)
        info = ForwardInfo(
            forward_id=0,
            request_T=(0,) * num_tokens,
            phase_T=(Phase.PREFILL,) * num_tokens,
            position_T=tuple(range(num_tokens)),
        )
        watched = list[torch.Tensor]()
        watching = runtime.watch_products(layer, lambda products_TKD: watched.append(products_TKD.clone()))
        for measured in (False, True):
            runtime.begin_forward(info)
            with _Large(index_TK.numel() * hidden_TD.shape[1] * 4) as large, torch.inference_mode():
                output_TD = runtime.forward(layer, hidden_TD, index_TK, weights_TK)
            runtime.end_forward()
            if not measured:
                watching.remove()
        runtime.close()
    assert len(large.made) == 1
    assert torch.equal(output_TD, (watched[0] * weights_TK[..., None]).sum(dim=1))
