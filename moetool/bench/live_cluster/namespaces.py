"""Hosts of a cluster on one machine: network namespaces with links shaped by the kernel.

Each host is a namespace with its own address and no route out of this machine. Ray and users reach all of them over one
bridge at full speed; every two servers share a pair of virtual interfaces, limited by the kernel's token bucket (`tc
tbf`). The bridge is in a namespace too: nothing outside the namespaces changes.
"""

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from moetool.base.errors import MoetoolError, UsageError

_NET = "10.77.0"
_HEAD = 254
"""The head's last byte of the address; hosts have 1, 2, ..."""
_RAY_PORT = 6379
_STORE_BYTES = 80 * 2**20
_BURST_BYTES = 1600
"""Burst of an idle link: one packet, the minimum."""
_QUEUE = "400ms"
_NETNS = Path("/run/netns")
_FOLDERS = Path("/run")
"""Owned by root; short, since it contains sockets, whose paths are limited to 107 bytes."""
_CLONE_NEWNET = 0x40000000
_START_S = 120.0
_NAME = re.compile(r"moetool-(\d+)(?:-\w+)?")
"""Names of namespaces and of their directory."""


def require_namespaces() -> None:
    """Raises: UsageError: this user or machine cannot create hosts."""
    otherwise = "or run the servers without them: --set bench.where=processes"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise UsageError(f"hosts in namespaces need {missing[0]} of iproute2; install it, {otherwise}")
    if os.geteuid() != 0:
        raise UsageError(f"only root can create hosts in namespaces, not user {os.geteuid()}; run as root, {otherwise}")


class Hosts:
    """A head and several hosts, each with its own network. One instance at a time per process.

    Args:
        count: number of hosts besides the head.
        link_bytes_s: rate from one host to another, by (from, to); pairs without one are not shaped.

    Attributes:
        environment: environment of processes that join their Ray, with its token.
        count: number of hosts.
        names: names of the hosts' namespaces; they contain this process's id.

    Effects: makes namespaces. `close` ends every process in them and removes them. Namespaces left by a killed process
    are removed first.

    Raises:
        UsageError: the user lacks the permission, or iproute2 is missing.
        MoetoolError: the machine refuses.
    """

    _open: ClassVar[bool] = False
    """Whether this process has an instance; if not, namespaces with its id belong to an earlier process."""

    def __init__(self, count: int, link_bytes_s: Mapping[tuple[int, int], float] | None = None) -> None:
        assert not Hosts._open, "one at a time"
        require_namespaces()
        if not 0 < count < _HEAD:
            raise UsageError(f"{count} hosts, expected 1 to {_HEAD - 1}")
        remove_leftovers()
        self.count = count
        prefix = f"moetool-{os.getpid()}"
        self.names = tuple(f"{prefix}-{n}" for n in range(count))
        self.head, self._hub = f"{prefix}-head", f"{prefix}-hub"
        self._folder = _FOLDERS / prefix
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._folder / "token")}
        Hosts._open = True
        try:
            self._make_folder()
            self._join_all()
            self._link_all(dict(link_bytes_s or {}))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ray_address(self) -> str:
        """Address of the head, for `moetool.cluster.launch.ClusterAddress`."""
        return f"{self.address(None)}:{_RAY_PORT}"

    def address(self, n: int | None) -> str:
        """Address of a host; None: of the head."""
        return f"{_NET}.{_HEAD if n is None else n + 1}"

    def namespace(self, n: int | None) -> str:
        """Name of a host's namespace; None: of the head's."""
        return self.head if n is None else self.names[n]

    def shape(self, sender: int, receiver: int, bytes_s: float) -> None:
        """Limit what each host sends to another to this rate.

        A message of more than a packet waits for its bytes; a single packet on an idle link does not.
        """
        what = f"qdisc replace dev to{receiver} root tbf rate {max(8, round(8 * bytes_s))}bit"
        _tool("tc", "-n", self.names[sender], *what.split(), "burst", str(_BURST_BYTES), "latency", _QUEUE)

    def cut(self, n: int, down: bool = True) -> None:
        """Take a host off all networks, or back on."""
        state = "down" if down else "up"
        # The far ends: a link with one end down carries nothing, but keeps addresses and routes.
        _tool("ip", "-n", self._hub, "link", "set", f"host{n}", state)
        for other in range(self.count):
            if other != n:
                _tool("ip", "-n", self.names[other], "link", "set", f"to{n}", state)
                if not down:
                    self._route(other, n)

    def command(self, n: int | None, *command: str) -> list[str]:
        """Command line that runs a command on a host."""
        return ["ip", "netns", "exec", self.namespace(n), *command]

    def start_ray(self, names: Sequence[str] = (), hosts: Sequence[int] | None = None) -> None:
        """Start Ray's head if it is not running, and join hosts to it.

        Args:
            names: server names by host (default: any server on any host).
            hosts: numbers of the hosts (default: all).

        Raises:
            MoetoolError: Ray does not start.
        """
        if not self.pids(None):
            self._ray(None, "--head", f"--port={_RAY_PORT}", "--include-dashboard=false").finish()
        starts = []
        try:
            for n in range(self.count) if hosts is None else hosts:
                resources = [f'--resources={{"moetool:{names[n]}": 1}}'] if names else []
                starts.append(self._ray(n, f"--address={self.ray_address}", *resources))
            for start in starts:
                start.finish()
        finally:
            for start in starts:
                start.give_up()

    def pids(self, n: int | None) -> list[int]:
        return _pids(self.namespace(n))

    def kill(self, n: int | None) -> None:
        """Kill every process of a host, like a power failure; its network stays."""
        _end([self.namespace(n)])

    @contextlib.contextmanager
    def inside(self, n: int | None = None) -> Iterator[None]:
        """Move this thread and its children to a host (default: the head)."""
        mine = Path("/proc/thread-self/ns/net")
        with mine.open("rb") as before, (_NETNS / self.namespace(n)).open("rb") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def close(self) -> None:
        """End the hosts' processes, and the hosts."""
        Hosts._open = False
        _remove([*self.names, self.head, self._hub], self._folder)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(mode=0o700)
        except OSError as error:
            raise MoetoolError(f"cannot make the directory {self._folder} ({error.strerror or error})") from None
        Path(self.environment["RAY_AUTH_TOKEN_PATH"]).write_text(secrets.token_hex(32), encoding="ascii")

    def _join_all(self) -> None:
        _tool("ip", "netns", "add", self._hub)
        _tool("ip", "-n", self._hub, "link", "add", "hub", "type", "bridge")
        _tool("ip", "-n", self._hub, "link", "set", "hub", "up")
        for n in (None, *range(self.count)):
            name, port = self.namespace(n), "head" if n is None else f"host{n}"
            _tool("ip", "netns", "add", name)
            _tool("ip", "-n", name, "link", "set", "lo", "up")
            _tool("ip", "link", "add", "hub", "netns", name, "type", "veth", "peer", "name", port, "netns", self._hub)
            _tool("ip", "-n", self._hub, "link", "set", port, "master", "hub", "up")
            _tool("ip", "-n", name, "addr", "add", f"{self.address(n)}/24", "dev", "hub")
            _tool("ip", "-n", name, "link", "set", "hub", "up")

    def _link_all(self, link_bytes_s: dict[tuple[int, int], float]) -> None:
        for n, name in enumerate(self.names):
            for m in range(n):
                peer = ["peer", "name", f"to{n}", "netns", self.names[m]]
                _tool("ip", "link", "add", f"to{m}", "netns", name, "type", "veth", *peer)
                for one, other in ((n, m), (m, n)):
                    _tool("ip", "-n", self.names[one], "link", "set", f"to{other}", "up")
                for one, other in ((n, m), (m, n)):
                    self._route(one, other)
        for (sender, receiver), bytes_s in link_bytes_s.items():
            self.shape(sender, receiver, bytes_s)

    def _route(self, sender: int, receiver: int) -> None:
        """Route packets to a host over the link to it, from the sender's known address."""
        way = ["dev", f"to{receiver}", "src", self.address(sender)]
        _tool("ip", "-n", self.names[sender], "route", "replace", f"{self.address(receiver)}/32", *way)

    def _ray(self, n: int | None, *arguments: str) -> "_Start":
        folder = self._folder / ("head" if n is None else str(n))
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
        command += [f"--node-ip-address={self.address(n)}", "--num-cpus=0", f"--object-store-memory={_STORE_BYTES}"]
        command += [f"--temp-dir={folder}", "--disable-usage-stats", "--include-log-monitor=false"]
        return _Start(self.command(n, *command), "head" if n is None else self.address(n), self.environment)


class _Start:
    """A running `ray start`."""

    def __init__(self, command: Sequence[str], name: str, environment: Mapping[str, str]) -> None:
        self._name = name
        # Servers started by Ray's workers are not background jobs.
        environment = {**os.environ, **environment, "RAY_worker_niceness": "0"}
        # In its own session, so that Ctrl-C reaches only this process, which ends the hosts in order.
        self._popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> None:
        """Wait until it runs. Raises: MoetoolError."""
        try:
            said, _ = self._popen.communicate(timeout=_START_S)
        except subprocess.TimeoutExpired:
            self.give_up()
            raise MoetoolError(f"Ray did not start on host {self._name} in {_START_S:g} s") from None
        if self._popen.returncode:
            lines = [line for line in said.splitlines() if line.strip()] or ["no output"]
            raise MoetoolError(f"Ray did not start on host {self._name} ({lines[-1].strip()})")

    def give_up(self) -> None:
        """End it, unless it has ended."""
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()


def remove_leftovers() -> None:
    """Remove the hosts that ended processes left behind."""
    left: dict[int, list[str]] = {}
    for path in [*(_NETNS.iterdir() if _NETNS.is_dir() else ()), *_FOLDERS.glob("moetool-*")]:
        if (found := _NAME.fullmatch(path.name)) and not _lives(int(found[1])):
            left.setdefault(int(found[1]), []).append(path.name)
    for pid, names in left.items():
        _remove(names, _FOLDERS / f"moetool-{pid}")


def _lives(pid: int) -> bool:
    return Hosts._open if pid == os.getpid() else Path(f"/proc/{pid}").exists()


def _remove(names: Sequence[str], folder: Path) -> None:
    there = [name for name in names if (_NETNS / name).exists()]
    _end(there)
    for name in there:
        with contextlib.suppress(MoetoolError):  # the next process removes the rest
            _tool("ip", "netns", "del", name)
    shutil.rmtree(folder, ignore_errors=True)


def _end(names: Sequence[str], within_s: float = 10.0) -> None:
    """Kill all processes of these namespaces, and wait until none is left, up to a limit."""
    by = time.monotonic() + within_s
    while (pids := [pid for name in names for pid in _pids(name)]) and time.monotonic() < by:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _pids(name: str) -> list[int]:
    """Other processes whose first thread is in a namespace; none if it does not exist."""
    try:
        said = _tool("ip", "netns", "pids", name)
    except MoetoolError:
        if (_NETNS / name).exists():
            raise
        return []  # another process removed it meanwhile
    return [pid for pid in map(int, said.split()) if pid != os.getpid()]


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise MoetoolError(f"cannot enter the network of a host ({os.strerror(number)})")


def _tool(*command: str) -> str:
    """Run `ip` or `tc`; returns its output. Raises: MoetoolError, with its message."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"it ended with {done.returncode}").splitlines()[0]
        raise MoetoolError(f"{' '.join(command[:6])} ...: {said}; hosts in namespaces need root and its capabilities")
    return done.stdout
