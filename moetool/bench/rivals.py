"""Compare moetool with llama.cpp and plain transformers: the same weights, prompts, threads and memory.

Each engine runs in its own process, and with limited memory in a control group, whose limit includes the page cache:
llama.cpp maps its file, moetool sizes its expert pool, transformers offloads to disk (`device_map="auto"`). The same
client calls each engine's server; plain transformers has no server and times itself. Every prompt differs, so that no
prefix is reused.
"""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from moetool.base.errors import MoetoolError, UsageError, first_line
from moetool.base.tables import count, narrate
from moetool.bench.bench_result import BenchResult, Row, median, not_measured, recorded, table
from moetool.bench.memory_limits import bytes_read, drop_from_cache, limited_group
from moetool.capture.remote import RemoteServer
from moetool.measuring.machine_rates import disk_rates
from moetool.models.checkpoint import Checkpoint

ENGINES = ("moetool", "llama.cpp", "transformers")
_START_S, _ANSWER_S = 240, 600
_Ask = Callable[[list[int], int], tuple[float, int]]
_BESIDE_BYTES = 2**30  # of a limit, for transformers' libraries and the layer that it loads


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalOptions:
    """Options of `moetool bench rivals`.

    Attributes:
        rounds: measured requests, after one warm-up.
        shares: memory limits as shares of the model's bytes; 0: no limit.
        threads: threads of each engine.
        dtype: compute type of moetool and transformers.
        alternate: run the servers of one memory at once and ask them by turns; needs memory for all of them.
    """

    prompt_tokens: int = 256
    new_tokens: int = 32
    rounds: int = 3
    shares: tuple[float, ...] = (0.0, 0.5, 0.25)
    threads: int = os.cpu_count() or 1
    dtype: str = "bfloat16"
    alternate: bool = False

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.new_tokens, self.rounds, self.threads) < 1:
            raise UsageError("expected prompt_tokens, new_tokens, rounds and threads of 1 or more")
        if not all(0 <= share < 1 for share in self.shares):
            raise UsageError(
                f"shares is {list(self.shares)}, expected shares of the model from 0 (no limit) to below 1"
            )


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine in one memory: a limit in bytes, or None."""

    engine: str
    memory_bytes: int | None


def bench_rivals(
    model: str,
    *,
    gguf: Path | None,
    llama_server: str | None,
    engines: Sequence[str],
    options: RivalOptions,
    file: Path | None = None,
) -> BenchResult:
    """Measure every engine in every memory, one after the other or, with `alternate`, by turns.

    A row has the engine, its memory limit (None: none), and `why` it is not measured, or medians over the rounds:
    `prefill_tokens_s`, `decode_tokens_s`, `slowest_tokens_s` of the slowest round, `read_token_bytes` from disk per new
    token. Facts: `layers`; `token_bytes` of weights that one decoded token reads from memory, its experts and dense
    weights without the input embedding; `memory_bytes_s`, the best rate at which all threads read memory before any
    cell; `bound_tokens_s`, if decoding only read them at that rate; with limited memory `disk_bytes_s`, the rate of the
    model's disk.

    Args:
        gguf: the same weights for llama.cpp.
        llama_server: path of llama-server (default: found on PATH).
        file: see `BenchResult`.

    Effects: with limited memory, writes 64 MB beside the model for a moment, to measure its disk.
    """
    with Checkpoint.open(model) as checkpoint:
        import torch

        dtype = getattr(torch, options.dtype)
        dense, dense_read = checkpoint.dense_bytes(dtype), checkpoint.dense_token_bytes(dtype)
        in_file = checkpoint.stored_elements(dtype)
        spec, path = checkpoint.spec, checkpoint.path
        text = checkpoint.config.get_text_config()
        vocabulary, layers = int(text.vocab_size), int(text.num_hidden_layers)
    used = sum(k * size for k, size in zip(spec.top_k_L, spec.expert_bytes_L, strict=True))
    model_bytes, token_bytes = dense + in_file * dtype.itemsize + spec.all_experts_bytes, dense_read + used
    prompts = _prompts(vocabulary, options)
    server = llama_server or shutil.which("llama-server")
    with recorded("rivals", options, file) as made:
        made.facts = {
            "model": str(path),
            "layers": layers,
            "model_bytes": model_bytes,
            "token_bytes": token_bytes,
            "memory_bytes_s": 0.0,
        }
        if any(options.shares):
            rate, _, origin = disk_rates(path if path.is_dir() else path.parent)
            if not origin.startswith("assumed"):
                made.facts["disk_bytes_s"] = rate
        for share in options.shares:
            cells = [Cell(engine, int(share * model_bytes) or None) for engine in engines]
            for group in [cells] if options.alternate else [[cell] for cell in cells]:
                rate = max(made.facts["memory_bytes_s"], memory_bandwidth(options.threads))
                made.facts |= {"memory_bytes_s": rate, "bound_tokens_s": rate / token_bytes}
                for cell, found in _measure(group, path, gguf, server, prompts, options).items():
                    made.add(**asdict(cell), **found)
    return made


def memory_bandwidth(threads: int, num_bytes: int = 2**29, rounds: int = 12) -> float:
    """Best rate at which all threads read memory, in bytes per second, by single-row products and by sums."""
    import torch

    from moetool.kernels.cpu import matmul
    from moetool.kernels.cpu.huge_pages import ask_for_huge_pages

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight = torch.empty(num_bytes // 4096, 2048, dtype=torch.bfloat16)
        ask_for_huge_pages(weight)
        weight.fill_(1)
        x, words = torch.ones(1, 2048, dtype=torch.bfloat16), weight.view(torch.int64)
        ways: list[Callable[[], object]] = [words.sum]
        if matmul.takes(weight):
            ways.append(lambda: matmul.products([x], [weight]))
        best = float("inf")
        for way in ways * rounds:
            began = time.perf_counter()
            way()
            best = min(best, time.perf_counter() - began)
        return weight.nbytes / best
    finally:
        torch.set_num_threads(before)


def tables(made: BenchResult) -> Iterator[Any]:
    """One table, a row per measured cell, and why others were not measured."""
    facts = made.facts
    bound, layers = facts["bound_tokens_s"], facts.get("layers")  # files of earlier versions lack layers
    disk = facts.get("disk_bytes_s")
    yield table(
        f"{facts['model']}, {made.options['threads']} threads",
        [row for row in made.rows if "why" not in row],
        {
            "engine": ("engine", "s"),
            "memory": (lambda row: _memory(row["memory_bytes"]), "s"),
            "prefill tokens/s": ("prefill_tokens_s", ".0f"),
            "decode tokens/s": ("decode_tokens_s", ".1f"),
            "slowest": ("slowest_tokens_s", ".1f"),
            "MB read/token": ("read_token_bytes", "MB"),
            "x bound": (lambda row: bound / row["decode_tokens_s"], ".2f"),
            "x bytes moved": (lambda row: _times_moved(row, facts), ".2f"),
            "fixed ms/layer": (lambda row: layers and 1e3 * (1 / row["decode_tokens_s"] - 1 / bound) / layers, ".2f"),
        },
    )
    yield from not_measured(made, lambda row: f"{row['engine']}, memory {_memory(row['memory_bytes'])}")
    yield (
        f"A token reads {facts['token_bytes'] / 1e6:.0f} MB of weights; memory gives "
        f"{facts['memory_bytes_s'] / 1e9:.1f} GB/s: bound {bound:.1f} tokens/s."
        + (f" The disk gives {count(disk, 'B')}/s; 'bytes moved' bounds both." if disk else "")
        + f" 'fixed' is a token's time beyond that, divided by {layers} layers." * (layers is not None)
    )
    for row in made.rows:
        if row.get("decode_tokens_s", 0.0) > bound:
            yield (
                f"ERROR: {row['engine']} decoded faster than the bound: memory gave less than usual while its rate was "
                "measured. Run this bench again on an idle machine."
            )


def _times_moved(row: Row, facts: dict[str, Any]) -> float | None:
    """A token's time by that of the bytes that it moved, if the memory and the disk work at once."""
    if "disk_bytes_s" not in facts or row.get("read_token_bytes") is None:
        return None
    moved_s = max(1 / facts["bound_tokens_s"], row["read_token_bytes"] / facts["disk_bytes_s"])
    return 1 / (row["decode_tokens_s"] * moved_s)


def _memory(limit: int | None) -> str:
    return "all" if limit is None else count(limit, "B")


def _prompts(vocabulary: int, options: RivalOptions) -> list[list[int]]:
    draw = random.Random(0)
    low = min(300, vocabulary // 4)
    high = max(low + 1, min(4000, vocabulary - 1))
    return [[draw.randrange(low, high) for _ in range(options.prompt_tokens)] for _ in range(2 * options.rounds + 1)]


def _measure(
    cells: Sequence[Cell],
    path: Path,
    gguf: Path | None,
    server: str | None,
    prompts: list[list[int]],
    options: RivalOptions,
) -> dict[Cell, Row]:
    """Measure cells, by turns where there are several: whatever the machine does meanwhile happens to each of them."""
    found: dict[Cell, Row] = {}
    rounds: dict[Cell, list[Row]] = {}
    with contextlib.ExitStack() as stack:
        asks: dict[Cell, _Ask] = {}
        for cell in cells:
            narrate(f"moetool: {cell.engine}, memory {_memory(cell.memory_bytes)}")
            with _why_not(cell, found):
                if cell.engine == "transformers":
                    found[cell] = _measure_plain(cell, path, prompts, options)
                    continue
                ask = stack.enter_context(_served(cell, path, gguf, server, options))
                ask(prompts[0], 2)
                asks[cell], rounds[cell] = ask, []
        for number, pair in enumerate(zip(prompts[1::2], prompts[2::2], strict=True)):
            for cell in list(asks)[:: -1 if number % 2 else 1]:
                with _why_not(cell, found):
                    rounds[cell].append(_round(asks[cell], *pair, options.new_tokens))
    return {cell: found[cell] if cell in found else _rates(rounds[cell]) for cell in cells}


@contextlib.contextmanager
def _why_not(cell: Cell, found: dict[Cell, Row]) -> Iterator[None]:
    try:
        yield
    except MoetoolError as error:
        found[cell] = {"why": first_line(error)}


@contextlib.contextmanager
def _limited(cell: Cell, *files: Path | None) -> Iterator[list[str]]:
    """Make the cell's control group; yields the beginning of a command that runs in it."""
    if cell.memory_bytes is None:
        yield []
        return
    for one in files:
        if one is not None:
            drop_from_cache(one)
    with limited_group(cell.memory_bytes) as prefix:
        yield prefix


@contextlib.contextmanager
def _served(cell: Cell, path: Path, gguf: Path | None, server: str | None, options: RivalOptions) -> Iterator[_Ask]:
    """Run an engine's server. Yields: answers a prompt with so many tokens, in seconds and bytes read from disk."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    if cell.engine == "moetool":
        arguments = [sys.executable, "-m", "moetool", "serve", str(path), "--port", str(port)]
        arguments += ["--set", f"dtype={options.dtype}", "--set", f"threads={options.threads}"]
        arguments += ["--set", f"kv_tokens={_context(options)}"]
    elif server is None or not Path(server).is_file():
        raise MoetoolError("no llama-server on the PATH; give --llama-server")
    elif gguf is None:
        raise MoetoolError("no file of the same weights for llama-server; give --gguf")
    else:
        arguments = [server, "-m", str(gguf), "--port", str(port), "-t", str(options.threads)]
        arguments += ["-c", str(_context(options)), "-np", "1"]
    with (
        _limited(cell, path, gguf) as prefix,
        tempfile.TemporaryFile() as said,
        _running([*prefix, *arguments], options.threads, errors=said) as process,
    ):
        try:
            name = _wait(process, RemoteServer(url=url, timeout_s=5.0), cell)
        except MoetoolError as error:
            raise MoetoolError(_with_last_line(str(error), said)) from None
        client = RemoteServer(url=url, timeout_s=_ANSWER_S)

        def ask(prompt: list[int], new_tokens: int) -> tuple[float, int]:
            body = {"model": name, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
            read, began = bytes_read(process), time.perf_counter()
            try:
                answer = client.ask("/v1/completions", body)
            except MoetoolError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    raise MoetoolError(_ended(process.wait(1), cell)) from None
                raise
            taken = time.perf_counter() - began
            made = answer.get("usage", {}).get("completion_tokens")
            if made != new_tokens:
                raise MoetoolError(f"{cell.engine} made {made} tokens, expected {new_tokens}")
            return taken, bytes_read(process) - read

        yield ask


def _round(ask: _Ask, first: list[int], second: list[int], new_tokens: int) -> Row:
    """Rates of one round: a prompt with one new token, and another with `new_tokens` more."""
    one, one_read = ask(first, 1)
    many, many_read = ask(second, new_tokens + 1)
    prefill, decode = len(first) / one, new_tokens / max(1e-9, many - one)
    read = max(0.0, (many_read - one_read) / new_tokens)
    return {"prefill_tokens_s": prefill, "decode_tokens_s": decode, "read_token_bytes": read}


def _rates(rounds: Sequence[Row]) -> Row:
    names = ("prefill_tokens_s", "decode_tokens_s", "read_token_bytes")
    slowest = min(one["decode_tokens_s"] for one in rounds)
    return {**{name: median(rounds, name) for name in names}, "slowest_tokens_s": slowest, "rounds": rounds}


def _measure_plain(cell: Cell, path: Path, prompts: list[list[int]], options: RivalOptions) -> Row:
    settings = {
        "threads": options.threads,
        "dtype": options.dtype,
        "new_tokens": options.new_tokens,
        "prompts": prompts[: options.rounds + 1],
        "offload_bytes": cell.memory_bytes and max(1, cell.memory_bytes - _BESIDE_BYTES),
    }
    command = [sys.executable, "-m", "moetool.bench.plain_generation", str(path), json.dumps(settings)]
    with (
        _limited(cell, path) as prefix,
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryFile() as errors,
        _running([*prefix, *command], options.threads, out=said, errors=errors) as process,
    ):
        try:
            process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            raise MoetoolError(f"no answer in {_ANSWER_S} s") from None
        if process.returncode:
            raise MoetoolError(_with_last_line(_ended(process.returncode, cell), errors))
        said.seek(0)
        seconds = json.loads(said.read().splitlines()[-1])[1:]
    return _rates(
        [
            {"prefill_tokens_s": options.prompt_tokens / prompt_s, "decode_tokens_s": options.new_tokens / decode_s}
            for prompt_s, decode_s in seconds
        ]
    )


@contextlib.contextmanager
def _running(
    command: list[str], threads: int, *, out: Any = subprocess.DEVNULL, errors: Any = subprocess.DEVNULL
) -> Iterator["subprocess.Popen[bytes]"]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", server: RemoteServer, cell: Cell) -> str:
    """Wait for a server; return the name of its model."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise MoetoolError(_ended(process.returncode, cell))
        with contextlib.suppress(MoetoolError, LookupError):
            server.ask("/health")
            return str(server.ask("/v1/models")["data"][0]["id"])
        time.sleep(0.2)
    raise MoetoolError(f"{cell.engine} was not ready after {_START_S} s")


def _with_last_line(why: str, said: IO[bytes]) -> str:
    """An error with the last line that the process wrote, if any."""
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return f"{why}: {lines[-1]}" if lines else why


def _ended(status: int, cell: Cell) -> str:
    if status in (-9, 137) and cell.memory_bytes is not None:
        return f"{cell.engine} was killed: it needs more than {cell.memory_bytes:,} bytes"
    return f"{cell.engine} ended with status {status}"


def _context(options: RivalOptions) -> int:
    return -(-2 * (options.prompt_tokens + options.new_tokens) // 256) * 256


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
