"""No command reaches the network by itself: sockets other than of this machine are watched and refused."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.edge_process import edge_cluster
from tests.servers import post

WATCH = """
import ipaddress, os, socket, sys

OWN = os.environ["MOETOOL_TEST_OWN"].split()

def _local(host):
    if host in (None, "", b"", "localhost", b"localhost", *OWN):
        return True
    try:
        address = ipaddress.ip_address(host.decode() if isinstance(host, bytes) else str(host).partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified

def _watch(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        if event == "socket.connect" and args[0].type == socket.SOCK_DGRAM:
            return  # sends nothing; programs learn their own address by it
        address = args[1]
        host = address[0] if isinstance(address, tuple) else None  # None: a Unix socket, or one connected before
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyname_ex"):
        host = args[0]
    else:
        return
    if not _local(host):
        with open(os.environ["MOETOOL_TEST_NETWORK"], "a") as found:
            found.write(f"{event} {host} in {sys.argv}\\n")
        raise OSError(101, "Network is unreachable")

sys.addaudithook(_watch)
"""
"""A sitecustomize module, which every Python process of the command imports first."""

RUN = """
import sys
from moetool.cli.main import main

for line in sys.stdin:
    sys.argv = ["moetool", *line.split()]
    try:
        main()
    except SystemExit as exit:
        assert not exit.code, (line, exit.code)
"""
"""Commands from stdin in one process, which imports torch once."""

STEPS = (
    "capture reference --data arithmetic --max-prompts 16 --max-new-tokens 8 --batch-size 8 --out trace",
    "train affinity --trace trace --out predictor",
    "plan cache --trace trace --predictor predictor --device-memory 30MB --frontier 0 --out plan.json",
    "replay --trace trace --policy lru,belady --budget 25%",
    "report trace --out page.html",
    "models",
    "doctor",
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a user who has never heard of HF_HUB_OFFLINE, under watch."""
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(WATCH)
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "PYTHONPATH")
    cards = psutil.net_if_addrs()
    path = [str(tmp_path / "watch"), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {
        **{name: value for name, value in os.environ.items() if name not in offline},
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "HF_HOME": str(tmp_path / "hf"),
        "MOETOOL_TEST_NETWORK": str(tmp_path / "network"),
        "MOETOOL_TEST_OWN": " ".join([socket.gethostname(), *(at.address for card in cards.values() for at in card)]),
    }


def test_the_watch_sees_a_connection(tmp_path: Path, environment: dict[str, str]) -> None:
    for code in (
        "import urllib.request as u; u.urlopen('http://192.0.2.1')",
        "import socket; socket.getaddrinfo('a.example', 1)",
    ):
        assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 1
    assert len((tmp_path / "network").read_text().splitlines()) == 2


def test_no_command_asks_the_network(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input="\n".join(STEPS),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    server = subprocess.Popen(
        [sys.executable, "-m", "moetool", "serve", "reference", "--plan", "plan.json", "--port", "0"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        url = next(found[1] for line in server.stderr if (found := re.search(r"serving on (http://\S+?)/v1", line)))
        body = {"model": "reference", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["usage"]["completion_tokens"] >= 1
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(120)
        server.stderr.close()
    network = tmp_path / "network"
    assert not network.exists(), network.read_text()


@pytest.mark.ray
def test_no_cluster_asks_the_network(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its servers' processes are watched too."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with edge_cluster(tmp_path) as cluster:
        body = {"model": "reference", "prompt": "The king said", "max_tokens": 4, "temperature": 0}
        for url in cluster.urls.values():
            assert post(url, "/v1/completions", body)[0] == 200
    network = tmp_path / "network"
    assert not network.exists(), network.read_text()
