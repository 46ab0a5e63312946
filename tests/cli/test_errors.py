"""Errors of commands: one line (found, expected, next command), and the exit code."""

import errno
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from moetool.base.errors import UsageError
from moetool.caching.plan import CachePlan
from moetool.cli import demo
from moetool.cli.examples import EXAMPLES
from tests.command_line import Run
from tests.profiles import compute, flat, make_profile
from tests.synthetic import make_spec

HEAVY = ("torch", "transformers", "lightning", "datasets", "pyarrow", "numpy", "scipy", "pandas", "fastapi", "pydantic")


@pytest.fixture(scope="module")
def short_trace(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six of the prompts: enough where no figure counts, in a seventh of the time."""
    from moetool.trace.edit import head
    from moetool.trace.reader import Trace

    return head(Trace(trace), tmp_path_factory.mktemp("short") / "trace", requests=6).path


class _WebPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>It works!</html>")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def web_pages() -> Iterator[str]:
    """A server that answers everything with a web page; its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _WebPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _one_line(result: tuple[int, str, str], code: int, *parts: str) -> None:
    found, out, err = result
    assert found == code, err
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    for part in parts:
        assert part in lines[0]


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core")
def test_numpy_computes_on_one_thread() -> None:
    script = (
        "import os, sys, threading; sys.argv = ['moetool', '--version']\n"
        "from moetool.cli import main as cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "import numpy as np; np.ones((512, 512)) @ np.ones((512, 512))\n"
        "print(len(os.listdir('/proc/self/task')), threading.active_count())"
    )
    usual = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=usual)
    tasks, threads = done.stdout.split()[-2:]
    assert tasks == threads  # OpenBLAS started none


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['moetool', '--help']\n"
        "from moetool.cli import main as cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        f"print('heavy:', [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "capture" in done.stdout
    assert done.stdout.strip().endswith("heavy: []")


def test_no_command_prints_the_help(run: Run) -> None:
    code, out, err = run()
    assert code == 2 and "Usage: moetool" in out and "capture" in out and err == ""


def test_a_wrong_command_line_is_said_in_one_line(run: Run) -> None:
    see = "moetool trace split --help"
    _one_line(run("trace", "split", "trace", "--out", "s"), 2, "missing option '--by'", see)
    _one_line(run("trace", "split", "trace", "--parts", "3"), 2, "no such option: --parts", see)
    _, _, err = run("trace", "split", "trace", "--parts", "3")
    assert "--set" not in err  # the command has none
    for command, option, setting in (
        ("replay", "--forget", "lfu.forget"),
        ("serve", "--d-type", "dtype"),
        ("serve", "--max-queue", "server.max_queue"),
        ("train", "--epochs", "fit.max_epochs"),
        ("train", "--batch-size", "fit.batch_size"),
        ("train", "--lr", "fit.learning_rate"),
    ):
        said = run(command, option, "0")
        _one_line(said, 2, f"no such option: {option}", f"as --set {setting}=VALUE", f"moetool {command} --help")
    for command in ("replay --d-type x", "serve reference --threshold 0.5"):  # near to none of its settings
        _, _, err = run(*command.split())
        assert "no such option" in err and "--set " not in err
    for argument in ("-Z", "--trace"):  # a letter, and an option without its value
        code, out, err = run("replay", argument)
        assert (code, out, len(err.splitlines())) == (2, "", 1) and "=VALUE" not in err
    _one_line(run("train"), 2, "argument 'PREDICTOR'", "option '--out'", "moetool train --help")
    _one_line(run("plan", "placement", "--trace", "t"), 2, "'--cluster'", "'--planner'", "'--out'", "placement --help")
    _one_line(run("tarin"), 2, "no such command 'tarin'", "train", "moetool --help")
    _one_line(run("capture", "reference", "--data=exam", "--out=t", "--batch-size", "0"), 2, "'--batch-size'", "1")
    _one_line(run("trace", "info", "trace", "more"), 2, "(more)")
    code, out, err = run("trace")
    assert (code, err) == (2, "")
    assert "merge" in out


def test_a_folder_of_something_else_is_not_to_be_replaced_by_a_predictor(run: Run, trace: Path) -> None:
    result = run("evaluate", trace, "--trace", trace)
    _one_line(result, 3, "not a predictor", "card.json", "moetool train")
    assert "--overwrite" not in result[2]


def test_commands_are_listed_in_the_order_in_which_they_are_met(run: Run) -> None:
    code, out, _ = run("--help")
    lines = [line.strip("│ ").split()[0] for line in out.partition("Commands")[2].splitlines() if line[2:3].isalpha()]
    assert code == 0
    assert [name for name in lines if name in ("demo", "trace", "capture", "plan", "simulate", "train")] == [
        *("capture", "train", "plan", "simulate", "trace", "demo")
    ]


def test_wrong_model_path(run: Run, tmp_path: Path) -> None:
    _one_line(run("serve", "--port", 0, tmp_path / "none"), 2, "no model at", "'reference'")
    _one_line(run("serve", "--port", 0, tmp_path), 2, "has no config.json")
    (tmp_path / "model.safetensors").touch()
    _one_line(run("serve", "--port", 0, tmp_path / "model.safetensors"), 2, "is one file", "give its directory")
    _one_line(
        run("capture", tmp_path / "none", "--data", "chat", "--max-prompts", 1, "--out", tmp_path / "t"),
        2,
        "no model at",
    )


def test_a_hub_name_that_cannot_be_had(run: Run) -> None:
    _one_line(
        run("serve", "--port", 0, "nobody/no-such-model"),
        2,
        "cannot get 'nobody/no-such-model' from the hub",
        "reference",
    )


def test_unknown_dataset(run: Run, tmp_path: Path) -> None:
    _one_line(
        run("capture", "reference", "--data", "aritmetic", "--out", tmp_path / "t"), 2, "did you mean 'arithmetic'"
    )


def test_unknown_policy(run: Run, trace: Path) -> None:
    _one_line(run("replay", "--trace", trace, "--policy", "lrru", "--budget", "50%"), 2, "did you mean 'lru'?")
    _one_line(run("serve", "reference", "--policy", "duoserv", "--port", 0), 2, "did you mean 'duoserve'?")


def test_a_policy_that_cannot_serve(run: Run) -> None:
    _one_line(run("serve", "reference", "--policy", "belady", "--port", 0), 2, "needs future requests")
    _one_line(run("serve", "reference", "--policy", "duoserve", "--port", 0), 2, "needs a predictor")


def test_a_timeline_needs_the_costs_of_its_model_and_device(run: Run, trace: Path, tmp_path: Path) -> None:
    from moetool.trace.reader import Trace

    replaying = ("replay", "--trace", trace, "--policy", "lru", "--budget", "50%")
    _one_line(run(*replaying, "--profile", tmp_path / "none"), 2, "no profile at", "moetool profile MODEL")
    _one_line(run(*replaying, "--set", "timeline.device=cuda"), 2, "without a profile", "--profile FILE")
    profile = tmp_path / "profile.json"
    make_profile(Trace(trace).spec).save(profile)
    timed = (*replaying, "--profile", profile)
    _one_line(run(*timed, "--set", "timeline.devise=cuda"), 2, "did you mean 'device'")
    _one_line(run(*timed, "--set", "timeline=cuda"), 2, "expected options by name")
    _one_line(run(*timed, "--set", "timeline.device=cuda"), 3, "no costs of any dtype on cuda")
    make_profile(make_spec()).save(profile)
    _one_line(run(*timed), 3, "the profile is of synthetic", "moetool profile")


def test_several_devices(run: Run, trace: Path, tmp_path: Path) -> None:
    replaying = ("replay", "--trace", trace, "--policy", "lru")
    for wrong in ("0", "two", "1.5", "true"):
        _one_line(
            run(*replaying, "--budget", "50%", "--set", f"devices={wrong}"), 2, "devices is", "expected 1 or more"
        )
    _one_line(run(*replaying, "--budget", "300kB", "--set", "devices=3"), 4, "on 3 devices", "set fewer devices")
    _one_line(run("serve", "reference", "--set", "devices=0", "--port", 0), 2, "devices is 0, expected at least 1")
    _one_line(run("serve", "reference", "--set", "devices=200", "--port", 0), 4, "on 200 devices leave 1 to one")
    planning = ("plan", "cache", "--trace", trace, "--device-memory", "20MB", "--out", tmp_path / "plan.json")
    _one_line(run(*planning, "--set", "devices=2"), 2, "a plan is made for one device")
    code, out, _ = run(*replaying, "--budget", "50%", "--set", "devices=2", "--json")
    assert code == 0
    assert [row["devices"] for row in json.loads(out)] == [2]
    code, out, _ = run(*replaying, "--budget", "50%", "--set", "devices=2")
    assert code == 0 and "2 devices" in " ".join(out.split())


def test_the_best_policy_by_name(run: Run, short_trace: Path, tmp_path: Path) -> None:
    replaying = ("replay", "--trace", short_trace, "--policy", "auto,belady", "--budget", "4MB", "--json")
    code, printed, told = run(*replaying)
    assert code == 0
    assert "auto leaves out moesys, which needs 64 slots" in told
    rows = json.loads(printed)
    assert {row["policy"] for row in rows} > {"lru", "lfu", "on_demand", "belady"}
    (chosen,) = [row for row in rows if row["auto"]]
    assert f"auto is {chosen['policy']} with 4.0 MB" in told
    touched = {
        row["policy"]: row["bytes_per_decode_token"] + row["host_bytes_per_decode_token"]
        for row in rows
        if row["policy"] != "belady"
    }
    assert touched[chosen["policy"]] == min(touched.values())


def test_times_by_a_profile(run: Run, short_trace: Path, tmp_path: Path) -> None:
    from moetool.trace.reader import Trace

    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    make_profile(Trace(short_trace).spec, compute(dtype="bfloat16")).save(profile)
    code, printed, told = run(
        "replay", "--trace", short_trace, "--policy", "lru", "--budget", "25%", "--profile", profile
    )
    assert code == 0, told
    assert "TTFT" in printed
    code, printed, told = run(
        *("plan", "cache", "--trace", short_trace, "--device-memory", "30MB", "--frontier", 1),
        *("--out", plan, "--profile", profile),
    )
    assert code == 0, told
    assert "had the shortest time per output token" in printed
    assert json.loads(plan.read_text())["profile_sha256"]
    assert "Best policy by device memory" in printed
    planning = ("plan", "cache", "--trace", short_trace, "--device-memory", "30MB", "--out", plan)
    _one_line(run(*planning), 2, "exists already; choose another or pass --overwrite")
    planning += ("--overwrite",)
    _one_line(run(*planning, "--target-tpot", "80ms"), 2, "give its costs with --profile")
    planning += ("--profile", profile, "--frontier", 0)
    _one_line(run(*planning, "--target-tpot", "fast"), 2, "'fast' is not a duration", "80ms")
    _one_line(
        run(*planning, "-q", "--target-tpot", "0.0001us"), 4, "no policy brings a token to 1e-07 ms", "--device-memory"
    )
    target = json.loads(plan.read_text())["evidence"][0]["tpot_serial_bound_s"] * 2
    code, printed, told = run(*planning, "--target-tpot", f"{target:.12f}s", "--json")
    assert code == 0, told
    values = json.loads(printed)
    assert values["device_memory_bytes"] <= 30_000_000
    assert (values["frontier"], values["target_tpot_s"]) == ([], float(f"{target:.12f}"))


def test_a_plan_is_for_the_device_and_data_type_of_a_server_here(
    run: Run, short_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moetool.trace.reader import Trace

    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    planning = ("plan", "cache", "--trace", short_trace, "--device-memory", "31MB", "--frontier", 0)
    planning += ("--pool", "one", "--out", plan, "--overwrite")
    found = []
    for given in ((), ("--set", "dtype=float32")):
        assert run(*planning, *given)[0] == 0
        found.append(CachePlan.load(plan))
    assert [each.dtype for each in found] == ["bfloat16", "float32"]
    assert found[0].dense_bytes < 0.6 * found[1].dense_bytes
    assert found[0].kv_bytes / found[0].kv_tokens < 0.6 * found[1].kv_bytes / found[1].kv_tokens
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (8 << 30, 8 << 30))
    make_profile(Trace(short_trace).spec, compute(device="cuda", dtype="bfloat16"), loads={"pinned": flat(1)}).save(
        profile
    )
    planning += ("--profile", profile)
    code, _, told = run(*planning)
    assert code == 0, told
    _one_line(run(*planning, "--set", "host_memory_bytes=0"), 3, "no load costs of tier disk")
    _one_line(run(*planning, "--set", "device=cpu"), 3, "no costs of bfloat16 on cpu")


def test_unknown_predictor(run: Run, trace: Path, tmp_path: Path) -> None:
    _one_line(run("train", "expertmlp", "--trace", trace, "--out", tmp_path / "p"), 2, "did you mean 'expert_mlp'?")


def test_a_pool_below_the_smallest_legal(run: Run, trace: Path, tmp_path: Path) -> None:
    for policy in ("lru", "auto"):
        small = run("replay", "--trace", trace, "--policy", policy, "--budget", "100kB")
        _one_line(small, 4, "--budget is too small", "smallest legal pool has 2")
    _one_line(run("serve", "reference", "--device-memory", "3MB", "--port", 0), 4, "it needs at least 5.5 MB")
    plan = ("plan", "cache", "--trace", trace, "--device-memory", "3MB", "--out", tmp_path / "plan.json")
    _one_line(run(*plan), 4, "--device-memory 3.0 MB is too small for", "expert slots")


def test_a_plan_that_is_not_there(run: Run, tmp_path: Path) -> None:
    _one_line(run("report", tmp_path / "plan.json", "--out", tmp_path / "page.html"), 2, "no plan at", "plan cache")


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("lots", "'lots' is not an amount of memory"),
        ("0%", "'0%' is not an amount of memory"),
        ("0.0000001%", "'0.0000001%' is not an amount of memory"),  # less than a byte
        ("-25%", "'-25%' is not an amount of memory"),
        ("nan%", "'nan%' is not an amount of memory"),
        pytest.param(f"{10**400}GB", "is not an amount of memory", id="too many digits"),
        ("200%", "'200%' is more than the whole"),
        ("25%,100.1%", "'100.1%' is more than the whole"),
    ],
)
def test_no_amount_of_memory(run: Run, trace: Path, budget: str, says: str) -> None:
    _one_line(run("replay", "--trace", trace, "--policy", "lru", f"--budget={budget}"), 2, says)


def test_all_wrong_options_are_named_at_once(run: Run, trace: Path, tmp_path: Path) -> None:
    replay = ("replay", "--trace", trace, "--policy", "lru,nope", "--budget", "200%,x", "--machine", "h10")
    facts = ("unknown policy 'nope'", "'200%' is more", "'x' is not an amount", "unknown machine 'h10'")
    _one_line(run(*replay), 2, *facts)
    wrong = ("--order", "up", "--pool", "two", "--misses", "never")
    _one_line(run(*replay, *wrong), 2, *facts, *map(repr, wrong[1::2]))
    missing = tmp_path / "none.toml"
    for command in (("compare",), ("placement", "--out", tmp_path / "plan.json")):
        plan = ("plan", *command, "--trace", "nowhere", "--cluster", missing, "--planner", "nope", "--for", "sgl")
        settings = ("--set", "starts=up", "--machine", "h10")
        _one_line(run(*plan, *settings), 2, "'nope'", "'sgl'", "'up'", "'h10'", "'nowhere'", "none.toml")
    assert not (tmp_path / "plan.json").exists()
    serve = ("serve", "reference", "--policy", "nope", "--process-memory", "1XB", "--predictor", tmp_path / "none")
    _one_line(
        run(*serve, "--device-memory", "lots", "--port", 0), 2, "'nope'", "'1XB'", "'lots'", str(tmp_path / "none")
    )
    simulate = ("simulate", "--trace", "nowhere", "--cluster", missing, "--planner", "nope")
    _one_line(run(*simulate), 2, "'nope'", "'nowhere'", "none.toml")
    migrate = ("plan", "migrate", tmp_path / "old.json", tmp_path / "new.json", "--trace", "nowhere")
    _one_line(run(*migrate, "--horizon-tokens=-5", "--out", tmp_path / "m.json"), 2, "-5.0", "old.json", "new.json")


def test_no_trace(run: Run, tmp_path: Path) -> None:
    _one_line(run("trace", "info", tmp_path / "none"), 2, "no trace at", "moetool capture")
    (tmp_path / "empty").mkdir()
    _one_line(run("trace", "info", tmp_path / "empty"), 3, "no manifest.json")


def test_something_else_in_the_place_of_a_trace_or_predictor(run: Run, reference: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"kind": "cache_plan", "schema_version": 1}')
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "card.json").write_text("{}")
    for path, what in ((plan, "is of kind cache_plan"), (tmp_path / "p", "is a predictor"), (reference, "is a model")):
        _one_line(run("advise", path), 2, f"{path} {what}, expected a trace")
    _one_line(run("evaluate", plan, "--trace", plan), 2, f"{plan} is one file, not a predictor", "--out NEW")
    plan.write_text('{"kind": "alpha", "rows": []}')
    _one_line(run("advise", plan), 2, "is one file, not a trace", "moetool trace import")
    os.mkfifo(tmp_path / "pipe")
    _one_line(run("advise", tmp_path / "pipe"), 2, "is neither a file nor a directory", "give the directory of one")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("0,1,0\n0,2,0\n", "read as llamacpp_moe_profile: rows of whole numbers without a header"),
        ("layer,expert,token\n0,1,0\n0,1,0\n", "gives token 0 the experts [1, 1], expected 2 different ones; record"),
        ("layer,expert,token\n0,99,0\n", "uses expert 99, expected 0 to 7; give the right num_experts, or record"),
        ("layer,expert,token\n0,1.5,0\n", "has values in expert that are not whole numbers"),
        ("layer,expert,token\n0,1\n", "is not a complete table"),
        ("layer,expert,token\n0,99999999999,0\n", "expected numbers from 0 to 2,147,483,647"),
        ("layer,expert,token\n", "has no rows, expected some; record again"),
    ],
)
def test_a_table_with_one_mistake(run: Run, tmp_path: Path, rows: str, says: str) -> None:
    (tmp_path / "own.csv").write_text(rows)
    sizes = ("--set", "num_experts=8", "--set", "expert_bytes=10")
    result = run("trace", "import", tmp_path / "own.csv", *sizes, "--out", tmp_path / "t")
    _one_line(result, 3, says, "--format chooses another")
    assert "download the file again" not in result[2] and not (tmp_path / "t").exists()


def test_the_bytes_of_an_expert_may_have_a_unit(run: Run, tmp_path: Path) -> None:
    from moetool.trace.reader import Trace

    (tmp_path / "own.csv").write_text("layer,expert,token\n0,1,0\n")
    importing = ("trace", "import", tmp_path / "own.csv", "--out", tmp_path / "t", "--set", "num_experts=8", "--set")
    _one_line(run(*importing, "expert_bytes=big"), 2, "--set expert_bytes: 'big' is not an amount of memory")
    assert run(*importing, "expert_bytes=16.5MiB")[0] == 0
    assert Trace(tmp_path / "t").spec.slot_bytes == 17_301_504


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "ftp://127.0.0.1"])
def test_an_address_that_none_can_have(run: Run, tmp_path: Path, url: str) -> None:
    _one_line(run("chat", url), 2, f"{url!r} is not a server address")


def test_a_server_of_web_pages(run: Run, tmp_path: Path) -> None:
    capture = ("capture", "reference", "--data", "chat", "--max-prompts", 1, "--out", tmp_path / "t")
    for url in ("http://[::1", "http://a..b:80"):
        _one_line(run(*capture, "--server", url), 2, f"{url!r}: expected an address such as")
    _one_line(run(*capture, "--server", "http://127.0.0.1:1/é"), 1, "does not answer ('ascii' codec")
    with web_pages() as url:
        _one_line(run("chat", url), 1, "answers otherwise than an OpenAI server; give the URL of one")
        _one_line(run(*capture, "--server", url), 1, "answers no JSON; give the address of an engine's server")


def test_a_file_system_that_is_read_only(
    run: Run, short_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No change of permissions would help there."""
    whole = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*whole[:8], os.ST_RDONLY, *whole[9:]]))
    plan = ("plan", "cache", "--trace", short_trace, "--out", tmp_path / "plan.json")
    _one_line(run(*plan), 1, "Read-only file system", "choose another path")


@pytest.mark.parametrize(
    ("field", "value", "code", "says"),
    [
        ("dtype", "float7", 3, "'float7'"),
        ("hidden_act", "gelu_banana", 2, "'gelu_banana'"),
        ("quantization_config", "awq", 3, "is 'awq', expected an object"),
        ("quantization_config", [], 3, "is [], expected an object"),
        ("quantization_config", False, 3, "is False, expected an object"),
    ],
)
def test_a_config_with_an_invalid_value(
    run: Run, reference: Path, tmp_path: Path, field: str, value: object, code: int, says: str
) -> None:
    config = json.loads((reference / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    _one_line(run("fit", tmp_path), code, f"config.json: {field}", says)


def test_weights_that_link_to_nothing(run: Run, reference: Path, tmp_path: Path) -> None:
    """As in a copy of the hub's cache without its blobs."""
    model = tmp_path / "m"
    shutil.copytree(reference, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "model.safetensors").symlink_to("../../blobs/5d")
    _one_line(run("serve", model, "--port", 0), 2, "model.safetensors links to a file that is gone", "cp -rL")


def test_corrupt_parquet(run: Run, trace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(trace, broken)
    (part,) = (broken / "tokens").glob("*.parquet")
    data = bytearray(part.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    part.write_bytes(data)
    _one_line(run("trace", "info", broken), 3, "is damaged", "capture again")
    _one_line(run("replay", "--trace", broken, "--policy", "lru", "--budget", "50%"), 3, "is damaged", "capture again")
    part.write_bytes(data[:middle])
    _one_line(run("replay", "--trace", broken, "--policy", "lru", "--budget", "50%"), 3, "bytes long, expected")


def test_a_plan_by_the_config_alone(run: Run, short_trace: Path, reference: Path, tmp_path: Path) -> None:
    """Weights are neither read nor compared, but the model must have the trace's layers and experts."""
    config = tmp_path / "config"
    config.mkdir()
    shutil.copy(reference / "config.json", config)
    plan = ("plan", "cache", "--trace", short_trace, "--device-memory", "30MB", "--frontier", 0, "--out")
    planning = (*plan, tmp_path / "plan.json")
    code, _, err = run(*planning, "--model", config, "--config-only")
    assert code == 0, err
    assert run(*plan, tmp_path / "whole.json")[0] == 0
    one, other = (CachePlan.load(tmp_path / name) for name in ("plan.json", "whole.json"))
    assert (one.policy, one.slots, one.spec) == (other.policy, other.slots, other.spec)
    planning += ("--overwrite",)
    _one_line(
        run(*planning, "--model", "deepseek-v2-lite", "--config-only"), 3, "has 26 MoE layers, but", "give --model"
    )
    _one_line(run(*planning, "--model", config, "--revision", "main"), 2, "is for a name on the hub")


def test_the_plan_of_another_model(run: Run, short_trace: Path, reference: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    planning = ("plan", "cache", "--trace", short_trace, "--device-memory", "30MB", "--frontier", 0)
    code, _, err = run(*planning, "--out", plan)
    assert code == 0, err
    other = tmp_path / "other"
    shutil.copytree(reference, other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    for more in ((), ("--set", "kv_tokens=1000000")):  # its memory would be too small as well
        serving = ("serve", other, "--plan", plan, "--port", 0, *more)
        _one_line(run(*serving), 3, "the plan was made for", "make the plan again")
    plan.write_text("{")
    _one_line(run("serve", "reference", "--plan", plan, "--port", 0), 3, "is damaged", "moetool plan cache")


def test_models_and_addresses_that_profile_refuses(run: Run) -> None:
    _one_line(run("profile"), 2, "no model given")
    _one_line(run("profile", "qwen3-30b-a3b"), 2, "--config-only")
    _one_line(run("profile", "qwen3-30b-a3c", "--config-only"), 2, "did you mean 'qwen3-30b-a3b'?")
    _one_line(run("profile", "reference", "--listen", "here:port"), 2, "not an address")
    _one_line(run("profile", "reference", "--listen", "192.0.2.1:80"), 1, "cannot listen on", "choose another address")


def test_a_port_that_no_cluster_can_have(run: Run) -> None:
    for address in ("127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1:port"):
        _one_line(run("doctor", "--cluster", address), 2, f"{address!r} is neither local:N nor the host:port")


def test_a_time_limit_is_read_before_the_model(run: Run, tmp_path: Path) -> None:
    planning = ("plan", "alpha", "reference", "--data", "chat", "--out", tmp_path / "alpha.json")
    _one_line(run(*planning, "--target-tpot", "5"), 2, "'5' is not a duration", "80ms")


def test_a_port_in_use(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _one_line(run("serve", "reference", "--port", port), 1, f"port {port}", "in use", "--port")


def test_unknown_settings_and_recipes(run: Run, tmp_path: Path) -> None:
    _one_line(run("serve", "reference", "--port", 0, "--set", "kv_token=5"), 2, "did you mean 'kv_tokens'?")
    _one_line(run("serve", "reference", "--port", 0, "--set", "kv_tokens"), 2, "write name=value")
    recipe = tmp_path / "r.toml"
    recipe.write_text("batchsize = 3\n")
    _one_line(run("capture", "reference", "--recipe", recipe), 2, "did you mean 'batch_size'?")
    _one_line(run("capture", "reference", "--recipe", tmp_path / "none.toml"), 2, "cannot read the recipe")


def test_replicas_that_cannot_be_made(run: Run, trace: Path, tmp_path: Path) -> None:
    train, out = ("train", "awq_replica"), ("--out", tmp_path / "r")
    _one_line(run(*train, "--data", "all", *out), 2, "made from a model and text", "moetool train awq_replica MODEL")
    _one_line(run(*train, "reference", "--trace", trace, *out), 2, "made from a model and text")
    _one_line(run("train", "affinity", *out), 2, "trained on a trace", "--trace DIR")
    _one_line(run("train", "affinity", "--trace", trace, "--bits", 4, *out), 2, "trained on a trace")
    made = (*train, "reference", "--data", "chat", *out)
    _one_line(run(*made, "--group", 128), 2, "group 128 does not divide the widths 64, 192", "does: 16, 32, 64")
    _one_line(run(*made, "--bits", 3), 2, "bits", "2, 4, 8")
    short = (*made, "--set", "length=1024")
    _one_line(run(*short), 2, "the calibration text has", "expected at least 8,192", "give more --data")
    _one_line(run(*made, "--set", "activation_bits=5"), 2, "activation_bits", "expected 4, 8 or 16")
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_named_with_the_output(
    run: Run, short_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / "r.csv"
    result = run("trace", "export", short_trace, "--format", "route_csv", "--out", out)
    _one_line(result, 1, "No space left on device", str(out), "free space, or write elsewhere")
    assert not any(tmp_path.iterdir())

    def denied(descriptor: int) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "fsync", denied)
    result = run("trace", "export", short_trace, "--format", "route_csv", "--out", out)
    _one_line(result, 1, f"Permission denied: {out}; change its permissions")


def test_outputs_that_cannot_be_written(run: Run, short_trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    plan = ("plan", "cache", "--trace", short_trace, "--device-memory", "30MB", "--frontier", 0, "--out")
    _one_line(run(*plan, tmp_path), 2, "is a directory, expected the name of a file")
    _one_line(run(*plan, file / "plan.json"), 1, "what was there before is unchanged")
    assert run(*plan, tmp_path / "new" / "plan.json")[0] == 0
    _one_line(run("serve", "reference", "--plan", tmp_path, "--port", 0), 2, "is a directory, expected a plan's file")
    capture = ("capture", "reference", "--data", "chat", "--max-prompts", 1, "--out")
    _one_line(run(*capture, file / "t"), 1, "what was there before is unchanged")
    _one_line(run(*capture, tmp_path / "new", "--overwrite"), 2, "moetool did not write it")
    _one_line(run("demo", "--out", file), 2, "is a file")
    _one_line(run("demo", "--out", short_trace), 2, "has no mark of an earlier demo (.moetool_demo)", "choose another")
    _one_line(run("serve", "reference", "--port", 0, "--log", short_trace), 2, "exists already")


def test_a_demo_replaces_the_files_of_an_earlier_one_only(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*parts: str) -> Path:
        raise UsageError("started")

    monkeypatch.setattr("moetool.base.assets.path", start)
    for folder, names, says in (
        ("whole", demo.FILES, "started"),
        ("marked", {demo.MARK, "trace"}, "started"),
        ("part", demo.FILES - {"memory.svg"}, "has no mark of an earlier demo (.moetool_demo)"),
    ):
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
        code, _, err = run("demo", "--out", tmp_path / folder)
        assert code == 2 and says in err, err


def test_numbers_that_make_no_sense(run: Run, trace: Path, tmp_path: Path) -> None:
    for setting in ("kv_tokens=-5", "max_requests=-1", "io_threads=0", "threads=-1"):
        _one_line(run("serve", "reference", "--port", 0, "--set", setting), 2, setting.split("=")[0], "at least")
        if "threads" in setting:
            many = f"{setting.split('=')[0]}=99999"
            _one_line(
                run("serve", "reference", "--port", 0, "--set", many), 2, f"{many.replace('=', ' is ')}, expected"
            )
    train = ("train", "expert_mlp", "--trace", trace, "--out", tmp_path / "p")
    _one_line(run(*train, "--set", "fit=3"), 2, "expected options by name")
    replay = ("replay", "--trace", trace)
    _one_line(run(*replay, "--policy", "", "--budget", "50%"), 2, "names nothing")
    for command in (("capture", "reference", "--data", "chat"), ("plan", "cache", "--trace", trace)):
        negative = run(*command, "--device-memory=-20MB", "--out", tmp_path / "t")
        _one_line(negative, 2, "--device-memory: '-20MB' is not an amount of memory")
    capture = ("capture", "reference", "--data", "chat", "--out", tmp_path / "t")
    planning = ("plan", "cache", "--trace", trace, "--out", tmp_path / "t")
    for command in (
        *((*capture, option, 10**20) for option in ("--threads", "--io-threads", "--workers")),
        *((*train, "--seed", seed) for seed in (-1, 10**20)),
        *((*planning, option, 10**20) for option in ("--frontier", "--jobs")),
        ("fit", "reference", "--capture", 10**20),
    ):
        _one_line(run(*command), 2, f"'{command[-2]}'", "Input should be")
    replay = (*replay, "--budget", "50%", "--policy")
    _one_line(run(*replay, "foresight", "--set", "foresight.memory=9999999"), 2, "expected 1 to 1,048,576")
    _one_line(run(*replay, "moe_infinity", "--set", "moe_infinity.history=9999999"), 2, "expected 1 to 1,048,576")
    train = ("train", "activation_matrix", "--trace", trace, "--out", tmp_path / "p")
    for history in (10**15, 2**63 - 1):
        _one_line(run(*train, "--set", f"history={history}"), 4, "activation_matrix is too large", "smaller options")
    _one_line(run("train", "lstm", *train[2:], "--set", f"hidden={2**62}"), 4, "lstm is too large", "smaller options")
    for predictor, setting in (("expert_mlp", f"hidden=[{10**20}]"), ("activation_matrix", f'history="{10**20}"')):
        result = run("train", predictor, *train[2:], "--set", setting)
        _one_line(result, 2, f"{predictor}: {setting.split('=')[0]}", f"is {10**20}, expected a number of at most 64")
    planning = ("plan", "placement", "--trace", trace, "--cluster", "2x1GB", "--out", tmp_path / "t", "--planner")
    for setting, planner in {"processes": "director", "nodes": "moetuner", "c_max": "annealing"}.items():
        for number in (2**63 - 1, 2**63):
            _one_line(run(*planning, planner, "--set", f"{setting}={number}"), 2, f"{setting} is {number}, expected")
    _one_line(run(*planning, "director", "--set", "processes=0"), 2, "director: processes is 0, expected 1 to 1,024")
    _one_line(run(*planning, "annealing", "--set", f'seed="{10**20}"'), 2, f"seed is {10**20}", "at most 64 bits")
    simulate = ("simulate", "--trace", f"server={trace}", "--cluster", "1x1GB", "--planner", "uniform")
    _one_line(run(*simulate, "--requests", 10**20), 2, "'--requests'", "10000000")
    _one_line(run(*simulate, "--sweep", "gpus=0"), 2, "found '0', expected a whole number, 1 or more")


def test_batches_are_shared_in_one_way(run: Run, tmp_path: Path) -> None:
    capture = ("capture", "reference", "--data", "chat", "--max-prompts", 1, "--out", tmp_path / "t")
    for shares in (("--workers", 2), ("--cluster", "local:2")):
        _one_line(run(*capture, *shares, "--server", "http://localhost:1"), 2, shares[0], "--server")


def test_devices_and_tiers_that_cannot_be_had(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    capture = ("capture", "reference", "--data", "chat", "--max-prompts", 1, "--out", tmp_path / "t")
    serve = ("serve", "reference", "--port", 0)
    for command in (capture, serve):
        _one_line(run(*command, "--device", "cuda"), 2, "finds no usable GPU", "moetool doctor", "omit --device")
        _one_line(run(*command, "--device", "gpu"), 2, "unknown device 'gpu'", "cpu, cuda")
    _one_line(run(*capture, "--device", "cuda", "--workers", 2), 2, "finds no usable GPU")
    _one_line(run(*serve, "--set", "device=cuda"), 2, "finds no usable GPU")
    _one_line(run(*serve, "--host-memory", "plenty"), 2, "'plenty' is not an amount of memory")
    _one_line(run(*serve, "--set", "host_memory_bytes=-1"), 2, "host_memory_bytes is -1")
    assert not (tmp_path / "t").exists()


def test_two_writers_of_one_output(run: Run, tmp_path: Path) -> None:
    from moetool.base import durable

    capture = ("capture", "reference", "--data", "chat", "--max-prompts", 1, "--out", tmp_path / "t")
    with durable.staged_directory(tmp_path / "t"):
        _one_line(run(*capture), 2, "another moetool is writing")
    assert (tmp_path / "t").is_dir()


def test_a_stopped_capture_is_gone_on_with_or_removed(run: Run, tmp_path: Path) -> None:
    capture = ("capture", "reference", "--data", "chat", "--max-prompts", 1, "--out", tmp_path / "t")
    stage = tmp_path / "t.stage"
    stage.mkdir()
    (stage / "batch-00000000.arrow").touch()
    (stage / "capture.json").write_text('{"threads": 7, "dtype": "float32"}')
    _one_line(run(*capture), 2, f"{stage} contains an interrupted capture", "--resume", f"rm -r {stage}")
    resumed = run(*capture, "--resume", "--threads", 1)
    _one_line(resumed, 3, "is of another capture", "threads was 7, and is 1 now", f"rm -r {stage}")


def test_importing_and_replaying_what_others_published(run: Run, tmp_path: Path) -> None:
    lines = [
        "# route_trace v1",
        "# model=tiny.gguf arch=tiny n_layer=2 n_expert=4 n_expert_used=1",
        "# layer=0 expert_bytes=100 dense_bytes=1",
        "# layer=1 expert_bytes=50 dense_bytes=1",
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes",
        *(f"0,{int(step > 0)},{step},{layer},0,{(step + layer) % 4},1,0,0" for step in range(5) for layer in (0, 1)),
    ]
    file, out = tmp_path / "routes.csv", tmp_path / "trace"
    file.write_text("\n".join(lines[:-1]))
    importing = ("trace", "import", file, "--format", "route_csv", "--out", out)
    _one_line(run(*importing), 3, "step 4, layer 1 has 0 rows", "expected one for each of 1 slots", "cut off")
    _one_line(run(*importing[:4], "csv", *importing[5:]), 2, "unknown format of routes 'csv'", "route_csv")
    file.write_text("\n".join(lines))
    _one_line(run(*importing, "--as", "decode"), 2, "leave out --as")
    code, printed, _ = run(*importing, "--json")
    assert (code, json.loads(printed)["tokens"]) == (0, 5)
    assert run("trace", "info", out)[0] == 0
    replaying = ("replay", "--trace", out, "--policy", "belady", "--budget", "100%", "--json")
    code, printed, _ = run(*replaying, "--set", "belady.whole_events=true")
    (row,) = json.loads(printed)
    assert (code, row["budget_bytes"], row["missed"]) == (0, 600, 8)
    _one_line(run(*replaying, "--set", "lru.x=1"), 2, "--set 'lru' fits none of belady")
    _one_line(run(*replaying, "--set", "belady.hole_events=true"), 2, "did you mean 'whole_events'")
    _one_line(run(*replaying, "--pool-unit", "byte"), 2, "did you mean 'bytes'")


def test_ctrl_c_ends_in_one_line(run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moetool.trace.reader.Trace", interrupted)
    _one_line(run("replay", "--trace", trace, "--policy", "lru", "--budget", "25%"), 130, "moetool: stopped")


def test_a_package_that_is_not_there(run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    capture = ("capture", "reference", "--data", "gsm8k", "--out", tmp_path / "t")
    _one_line(run(*capture), 1, "package datasets", "pip install datasets")
    monkeypatch.setattr(sys, "stdlib_module_names", {"datasets"})
    _one_line(run(*capture), 1, "package datasets", "use a Python that was built with it")
    monkeypatch.setattr("moetool.cli.main.OURS", ("datasets",))
    with pytest.raises(ModuleNotFoundError):  # what we forgot to ship is a bug, and shows where
        run(*capture)


def test_recipes_are_written_as_the_command_line_is(run: Run, trace: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("max-prompt = 3\n")
    capture = ("capture", "reference", "--data", "chat", "--out", tmp_path / "t", "--recipe", recipe)
    _one_line(run(*capture), 2, "unknown flag", "of moetool capture", "did you mean 'max_prompts'?")
    for name in ("set", "settings"):
        recipe.write_text(f'{name} = ["data.sed=1"]\n')
        _one_line(run(*capture), 2, "'sed'", "did you mean 'seed'?")


def test_files_where_folders_are_expected_and_the_other_way_round(run: Run, trace: Path, tmp_path: Path) -> None:
    _one_line(run("serve", "--port", 0, "reference", "--plan", trace), 2, "is a directory, expected a plan's file")
    _one_line(run("serve", "--port", 0, "reference", "--plan", tmp_path / "p.json"), 2, "moetool plan cache --trace")
    _one_line(run("plan", "export", trace, "--format", "sglang", "--out", tmp_path / "e.json"), 2, "is a directory")
    _one_line(run("profile", "reference", "--out", tmp_path), 2, "is a directory, expected the name of a file")


def test_an_address_of_another_machine(run: Run) -> None:
    _one_line(run("serve", "reference", "--host", "192.0.2.1"), 1, "cannot listen", "--host")


def test_every_command_has_examples_whose_flags_it_has(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for words, lines in EXAMPLES.items():
        code, out, _ = run(*words.split(), "--help")
        assert code == 0 and "Usage" in out
        assert "<bool>" not in out  # switches take no value
        for line in lines:
            assert line in out
            program, *parts = shlex.split(line)
            assert program == "moetool"
            assert parts[: len(words.split())] == words.split()
            options = out.partition("Options")[2].partition("xample")[0]
            for part in parts:
                if part.startswith("--"):
                    assert f"{part} " in options or f"{part}," in options, line


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "moetool", "trace", "split"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "moetool: missing argument 'DIR', option '--out', option '--by' (see moetool trace split --help)\n"
    )


def test_a_shipped_recipe_is_named_from_any_directory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The recipe names data, without which capture would ask for them first.
    _one_line(run("capture", "none", "--recipe", "reference/capture", "--out", "x"), 2, "none")
    _one_line(
        run("capture", "none", "--recipe", "../pyproject", "--out", "x"), 2, "cannot read the recipe ../pyproject"
    )


def test_remedies_fit_the_mistake(run: Run, trace: Path, tmp_path: Path) -> None:
    _one_line(run("chat", "http://127.0.0.1:9"), 1, "127.0.0.1:9", "moetool serve MODEL")
    _one_line(run("trace", "info", trace / "tokens"), 2, "part of a trace", str(trace))
    _one_line(run("replay", "--trace", trace, "--policy", "lru", "--budget", "25%,1%", "--draw", "x.gif"), 2, "x.gif")
    _one_line(run("trace", "split", trace, "--by", "request", "--share", "0.5", "--out", "/proc/x"), 2, "/proc")
    counts = tmp_path / "counts.csv"
    counts.write_text("layer,expert,count\n0,0,5\n")
    _one_line(run("report", counts, "--out", tmp_path / "page.html"), 2, str(counts), "moetool advise")
    _one_line(run("serve", "reference", "--port", "0", "--set", "dtype=bf16"), 2, "'bf16'", "bfloat16")


def test_the_guides_have_the_words_that_advise_prints(run: Run) -> None:
    for word in ("nvme", "pcie4"):
        code, out, _ = run("guide", word)
        assert code == 0 and word in out
