"""A cluster whose servers are on hosts of their own: network namespaces, with links that the kernel shapes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import UsageError
from moetool.bench.live_cluster.namespaces import Hosts, remove_leftovers, require_namespaces
from moetool.cluster.frames import Frame, LinkError
from moetool.cluster.listener import listen
from moetool.cluster.transport import Channel, Listener
from moetool.models.checkpoint import Checkpoint
from moetool.trace.reader import Trace
from tests.clusters import make_cluster, make_plan
from tests.edge_process import right_answers
from tests.identities import identity
from tests.servers import PATIENCE_S, eventually, post

pytestmark = pytest.mark.ray
KEY = "sesame"
BYTES_S = 2e6


def lacks() -> str:
    """Return the permissions that hosts need and this machine denies; empty if none."""
    try:
        require_namespaces()
    except UsageError as error:
        return str(error)
    name = f"moetool-{os.getpid()}-probe"
    tried = [
        f"ip netns add {name}",
        f"ip -n {name} link add hub type bridge",
        f"ip -n {name} link add one type veth peer name two",
        f"tc -n {name} qdisc add dev one root tbf rate 1mbit burst 1600 latency 400ms",
        f"ip netns exec {name} true",
    ]
    try:
        for command in tried:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                return f"{command}: {done.stderr.strip()}"
        return ""
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if missing := lacks():
        pytest.skip(missing)
    with Hosts(2, {(0, 1): BYTES_S, (1, 0): 10 * BYTES_S}) as made:
        yield made


def test_links_are_as_slow_as_they_are_said_to_be_and_can_be_cut(hosts: Hosts) -> None:
    with hosts.inside(1):
        sock = listen(hosts.address(1))
    listener = Listener(sock, identity("server-1"), lambda message: Frame(head={}, parts=[b"x" * message.head["want"]]))

    def ask(sends: int, wants: int, timeout_s: float = PATIENCE_S) -> float:
        began = time.monotonic()
        with hosts.inside(0):  # its thread is made here, and connects from there
            channel = Channel(1, listener.address, identity("server-0"))
            try:
                answer = channel.call({"want": wants}, [b"y" * sends], timeout_s=timeout_s).result()
            finally:
                channel.close()
        assert len(answer.parts[0]) == wants
        return time.monotonic() - began

    try:
        assert ask(1_000_000, 1) >= 0.9 * 1_000_000 / BYTES_S  # as fast as that it cannot have been
        assert ask(1, 1_000_000) >= 0.9 * 1_000_000 / (10 * BYTES_S)
        hosts.cut(1)
        try:
            with pytest.raises(LinkError):
                ask(1, 1, timeout_s=0.5)
        finally:
            hosts.cut(1, down=False)
        ask(1, 1)
    finally:
        listener.close()


def test_what_a_killed_process_has_left_is_removed(hosts: Hosts) -> None:
    program = (
        "import time; from moetool.bench.live_cluster.namespaces import Hosts; Hosts(1); print('made', flush=True); "
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    killed = subprocess.Popen(
        [sys.executable, "-c", f"{program}time.sleep(60)"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    name, folder = f"moetool-{killed.pid}-0", Path(f"/run/moetool-{killed.pid}")
    left = None
    try:
        assert killed.stdout is not None and killed.stdout.readline() == b"made\n"
        left = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "60"])
        eventually(lambda: bool(pids(name)))
        remove_leftovers()
        assert Path(f"/run/netns/{name}").exists() and folder.exists()  # its process lives
    finally:
        killed.kill()
        killed.communicate()
        remove_leftovers()
    assert left is not None and left.wait(PATIENCE_S) == -signal.SIGKILL
    assert not list(Path("/run/netns").glob(f"moetool-{killed.pid}-*")) and not folder.exists()
    assert all(Path(f"/run/netns/{name}").exists() for name in hosts.names)


def test_a_folder_that_lost_its_hosts_is_removed_too(hosts: Hosts) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder = Path(f"/run/moetool-{ended.pid}")
    (folder / "head").mkdir(parents=True)
    remove_leftovers()
    assert not folder.exists()


def pids(name: str) -> bytes:
    """The interfaces of a host, as `ip` prints them."""
    return subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=True).stdout


def went_over(hosts: Hosts) -> int:
    """Bytes that the kernel has let pass from the first host to the second."""
    command = ["tc", "-n", hosts.names[0], "-s", "-j", "qdisc", "show", "dev", "to1"]
    sent: int = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[0]["bytes"]
    return sent


@pytest.fixture(scope="module")
def joined(hosts: Hosts) -> Hosts:
    """The hosts, which have joined a Ray head that asks for a token."""
    pytest.importorskip("ray")
    hosts.start_ray(["s0", "s1"])
    return hosts


def run_on(hosts: Hosts, n: int | None, *arguments: str, **environment: str) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr and seconds of a moetool command on a host, without a token unless one is given."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {**os.environ, "PYTHONPATH": path, "HOME": "/nonexistent", **environment}
    began = time.monotonic()
    command = hosts.command(n, sys.executable, "-m", "moetool.cli.main", *arguments)
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


def test_hosts_share_the_batches_of_a_capture(joined: Hosts, tmp_path: Path) -> None:
    """With the rows of one host."""
    command = ["capture", "reference", "--data", "chat", "--max-prompts", "8", "--max-new-tokens", "3"]
    command += ["--batch-size", "2", "--threads", "1", "--dtype", "float32", "--device-memory", "20MB", "--json"]
    made, narrated = dict[str, Any](), ""
    for name, where in (("one", []), ("two", ["--cluster", joined.ray_address])):
        arguments = [*command, "--out", str(tmp_path / name), *where]
        code, said, narrated, _ = run_on(joined, 0, *arguments, **joined.environment)
        assert code == 0, narrated
        made[name] = json.loads(said)
    shares = [[int(n) for n in one] for one in re.findall(r"s[01]: (\d) batch\w*, (\d+) experts", narrated)]
    assert len(shares) == 2 and sum(batches for batches, _ in shares) == 4, narrated
    assert sum(reads for _, reads in shares) == made["two"]["reads"]["experts"]
    one, two = (Trace(tmp_path / name) for name in ("one", "two"))
    assert one.manifest["files"] == two.manifest["files"]


def test_the_doctor_compares_this_machine_with_the_head_and_all_that_have_joined(joined: Hosts) -> None:
    address = joined.ray_address
    code, said, _, _ = run_on(joined, 0, "doctor", "--cluster", address, "--json", **joined.environment)
    found = {check["name"]: check for check in json.loads(said)}
    assert code == 0 and all(check["good"] for check in found.values()), said
    assert list(found) == ["head", "token", "Python", "Ray", "moetool", "machines"]
    assert all(found[name]["meaning"] == "the same on all that answered" for name in ("Python", "Ray", "moetool"))
    assert "10.77.0.1 (s0), 10.77.0.2 (s1)" in found["machines"]["value"]
    path = {"RAY_AUTH_TOKEN_PATH": joined.environment["RAY_AUTH_TOKEN_PATH"]}
    code, said, _, _ = run_on(joined, 0, "doctor", "--cluster", address, **path)  # RAY_AUTH_MODE is found out
    assert code == 0 and "machines: ok" in said


@pytest.mark.parametrize(
    ("token", "port", "says"),
    [
        (None, 6379, "asks for a token, but this machine has none; copy ~/.ray/auth_token from the head's"),
        ("wrong" * 8, 6379, "does not accept the token in $RAY_AUTH_TOKEN; copy ~/.ray/auth_token from the head's"),
        ("wrong" * 8, 6388, "(Connection refused); start one there with: RAY_AUTH_MODE=token ray start --head"),
    ],
)
def test_who_may_not_join_is_told_why_within_seconds(
    joined: Hosts, tmp_path: Path, token: str | None, port: int, says: str
) -> None:
    spec = Checkpoint.open("reference").spec
    placed_GLE = np.zeros((2, spec.num_layers, spec.num_experts), bool)
    placed_GLE[0, :, ::2] = placed_GLE[1, :, 1::2] = True
    make_plan(spec, make_cluster([[130]] * 2, slot_bytes=spec.slot_bytes), placed_GLE).save(tmp_path / "plan.json")
    address = f"{joined.address(None)}:{port}"
    given = {} if token is None else {"RAY_AUTH_TOKEN": token}
    code, said, _, _ = run_on(joined, 0, "doctor", "--cluster", address, **given)
    assert code == 1 and says in said
    serve = ["serve", "reference", "--plan", str(tmp_path / "plan.json"), "--cluster", address, "--port", "0"]
    code, _, said, seconds = run_on(joined, 0, *serve, **given)
    assert code == 2 and says in said and len(said.splitlines()) == 1, said
    assert seconds < 30  # most of them to import torch beside others; Ray's own client takes 20 to 330


def test_servers_on_hosts_of_their_own_answer_as_one_would_and_outlive_head_and_ray(
    joined: Hosts, reference: Path, tokenizer: Any, tmp_path: Path
) -> None:
    hosts = joined
    spec = Checkpoint.open("reference").spec
    placed_GLE = np.zeros((2, spec.num_layers, spec.num_experts), bool)
    placed_GLE[0, :, ::2] = placed_GLE[1, :, 1::2] = True
    plan = tmp_path / "plan.json"
    make_plan(spec, make_cluster([[130]] * 2, slot_bytes=spec.slot_bytes), placed_GLE).save(plan)
    before = went_over(hosts)
    right = right_answers(reference, tokenizer, 8)
    # 127.0.0.1 is the head's machine only to itself: the servers have to hear of another address.
    where = ["--plan", str(plan), "--cluster", "127.0.0.1:6379", "--host", "0.0.0.0", "--port", "0"]
    sets = ("dtype=float32", "kv_tokens=512", "cluster.name=lab", "cluster.orphan_s=40")
    command = [sys.executable, "-m", "moetool.cli.main", "serve", "reference", *where]
    command += [part for one in sets for part in ("--set", one)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **hosts.environment, "PYTHONPATH": path, "MOETOOL_API_KEY": KEY}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "MOETOOL_LOG": "warning,cluster.edge=info"}

    def serve(log: Path) -> tuple[subprocess.Popen[bytes], str, dict[str, str]]:
        """A head, what it has said, and the servers' addresses, when they serve."""
        with log.open("w") as stderr:
            served = subprocess.Popen(hosts.command(None, *command), stderr=stderr, env=environment)
        eventually(lambda: "outlive" in log.read_text() or served.poll() is not None, within_s=300)
        return served, log.read_text(), dict(re.findall(r"(\w+) is serving on (http://\S+?)/v1", log.read_text()))

    def ask_all(urls: dict[str, str]) -> None:
        with hosts.inside():
            for url in urls.values():
                for prompt, text in right.items():
                    body = {"model": "reference", "prompt": prompt, "max_tokens": 8, "temperature": 0}
                    status, answer = post(url, "/v1/completions", body, Authorization=f"Bearer {KEY}")
                    assert (status, answer["choices"][0]["text"]) == (200, text)

    served, said, urls = serve(tmp_path / "first")
    try:
        assert {name: url.split(":")[1] for name, url in urls.items()} == {
            "s0": f"//{hosts.address(0)}",
            "s1": f"//{hosts.address(1)}",
        }, said
        ask_all(urls)
        workers = [pid for n in range(2) for pid in hosts.pids(n) if is_worker(pid)]
        assert len(workers) == 2
        served.kill()
        served.wait()
        ask_all(urls)
        served, said, again = serve(tmp_path / "second")
        assert "cluster lab serves without a head; taking over s0, s1" in said and again == urls
        ask_all(urls)
        os.kill(workers[1], signal.SIGSTOP)  # Ray ends what does not answer, on its host
        eventually(lambda: "server s1 is back on" in (tmp_path / "second").read_text(), within_s=120)
        ask_all(urls)
        assert not is_worker(workers[1])
        (leaving,) = (pid for pid in hosts.pids(1) if is_worker(pid))
        os.kill(leaving, signal.SIGTERM)
        eventually(lambda: "server s1 has left" in (tmp_path / "second").read_text())
        assert not is_worker(leaving)
        tried = "server s1 is not started: s1 was drained"  # beside its machine, which is still there
        eventually(lambda: (tmp_path / "second").read_text().count(tried) > 1)
        ask_all({"s0": urls["s0"]})
        assert not any(map(is_worker, hosts.pids(1)))
        hosts.kill(1)
        hosts.start_ray(["s0", "s1"], [1])
        eventually(lambda: (tmp_path / "second").read_text().count("server s1 is back on") == 2, within_s=120)
        ask_all(urls)
        hosts.kill(None)  # the head and Ray's: their machine has gone
        ask_all(urls)
        eventually(lambda: not any(is_worker(pid) for n in range(2) for pid in hosts.pids(n)))  # for lack of a head
    finally:
        served.kill()
        served.wait()
    assert went_over(hosts) - before > 50_000  # hidden states


def is_worker(pid: int) -> bool:
    """Whether a process is one of a cluster's servers."""
    try:
        return b"moetool-worker-" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
