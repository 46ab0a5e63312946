"""Quick check of a Ray head: whether it answers, accepts this machine's token and has compatible versions.

Ray's own client waits 20 s to 5.5 minutes for a head that is missing or refuses it, and logs meanwhile. So a separate
process asks, and is killed after a few seconds.
"""

import importlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetool import __version__
from moetool.base.errors import UsageError, first_line
from moetool.base.json_files import JsonRecord

REACH_S = 2.0
"""Seconds to connect to the head."""
_CHECK_S = 12.0
"""Seconds for all questions of a check, perhaps while the machine imports libraries for others."""
_MACHINES_S = 8.0
"""Seconds for the answers of machines, each of which starts a Python process first."""
_ALIVE = 0
_NAME = "moetool:"
START = "RAY_AUTH_MODE=token ray start --head --node-ip-address=ADDRESS"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMachine:
    """A machine of a cluster.

    Attributes:
        servers: names of its servers (`--resources '{"moetool:NAME": 1}'`).
        versions: its versions of Python, Ray and moetool; None if not asked or no answer.
        trouble: reason for no answer, if asked.
    """

    address: str
    servers: tuple[str, ...] = ()
    versions: Mapping[str, str] | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnswer:
    """A head's answer.

    Attributes:
        asks_token: whether it requires a token.
        versions: its versions of Python and Ray.
        machines: live machines that have joined.
    """

    asks_token: bool
    versions: Mapping[str, str]
    machines: tuple[JoinedMachine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCheck(JsonRecord):
    """One line of `moetool doctor --cluster`.

    Attributes:
        value: the finding.
        meaning: its meaning or the remedy.
        good: whether a cluster can be served; None: not known.
    """

    name: str
    value: str
    meaning: str
    good: bool | None


class _NoAnswer(UsageError):
    """The address did not answer as a Ray head, whatever the token is."""


def ask_head(address: str, *, machines: bool = False, within_s: float = _CHECK_S) -> HeadAnswer:
    """Ask the head at HOST:PORT, with this machine's token.

    Args:
        machines: whether to ask every joined machine for its versions.

    Effects: starts a process, for at most `within_s`.

    Raises:
        UsageError: no answer, not a Ray head, or it refuses this machine; in one line, with what to do.
    """
    require_reach(address)
    command = [sys.executable, "-m", "moetool.cluster.ray_check", address, *(["machines"] if machines else [])]
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        raise _NoAnswer(
            f"{address} gave no answer as a Ray head in {within_s:.0f} s; check it on its machine with: ray status"
        ) from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise _NoAnswer(f"cannot query the Ray head at {address} ({said[-1]})")
    found = json.loads(lines[-1])
    if (refusal := found.get("refusal")) is not None:
        raise (UsageError if refusal == "token" else _NoAnswer)(_refusal(address, refusal, os.environ))
    joined = tuple(JoinedMachine(**{**one, "servers": tuple(one["servers"])}) for one in found["machines"])
    return HeadAnswer(asks_token=found["asks_token"], versions=found["versions"], machines=joined)


def require_reach(address: str) -> None:
    """Require that HOST:PORT accepts connections. Raises: UsageError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        reason = "no answer; check firewalls"
        if not isinstance(error, TimeoutError):
            reason = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"no Ray head at {address} ({reason}); start one there with: {START} --port={port}") from None


def require_fitting(address: str, answer: HeadAnswer) -> None:
    """Require a head that this machine can use.

    Raises:
        UsageError: the head runs another Ray or Python, asks for no token, or this machine has not joined it.
    """
    if not answer.asks_token and os.environ.get("RAY_AUTH_MODE") == "token":
        raise UsageError(
            f"the Ray head at {address} asks for no token, but RAY_AUTH_MODE is token here; start it with: {START}"
        )
    for name, own in own_versions().items():
        if (theirs := answer.versions.get(name, own)) != own:
            raise UsageError(
                f"the Ray head at {address} runs {name} {theirs}, this machine {own}; install the same version on both"
            )
    if not any(is_here(machine.address) for machine in answer.machines):
        raise UsageError(
            f"this machine has not joined the Ray head at {address}; join with: ray start --address={address}"
        )


def own_versions() -> dict[str, str]:
    """Versions of Python and Ray on this machine. Raises: ImportError."""
    import ray

    return {"Python": platform.python_version(), "Ray": ray.__version__}


def is_here(address: str) -> bool:
    """Whether an IP address belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


def token_source(environment: Mapping[str, str]) -> str:
    """Return the source of this machine's Ray token; empty if there is none.

    Source: Ray's order: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.
    """
    if environment.get("RAY_AUTH_TOKEN"):
        return "$RAY_AUTH_TOKEN"
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return str(path) if path.is_file() and path.stat().st_size else ""


def check_cluster(address: str) -> list[ClusterCheck]:
    """Compare this machine with a Ray head and the machines that have joined it.

    Effects: as `ask_head`; takes at most 12 s, about 2 s without problems.
    """
    by = time.monotonic() + _CHECK_S
    try:
        require_reach(address)
    except UsageError as error:
        return [ClusterCheck(name="head", value="no answer", meaning=str(error), good=False)]
    reached = ClusterCheck(name="head", value=f"answers at {address}", meaning="this machine reaches it", good=True)
    source = token_source(os.environ)
    try:
        answer = ask_head(address, machines=True, within_s=by - time.monotonic())
    except _NoAnswer as error:
        return [replace(reached, value="no answer", meaning=str(error), good=False)]
    except UsageError as error:
        return [reached, ClusterCheck(name="token", value=source or "none", meaning=str(error), good=False)]
    token = ClusterCheck(
        name="token",
        value=f"accepted, from {source}" if answer.asks_token else "not required",
        meaning="only machines with this token may join"
        if answer.asks_token
        else f"anyone who reaches the head controls it; start it again with: {START}",
        good=True if answer.asks_token else None,
    )
    return [reached, token, *_compare(answer)]


def _compare(answer: HeadAnswer) -> list[ClusterCheck]:
    checks = []
    own = {**own_versions(), "moetool": __version__}
    for name, version in own.items():
        there = {one.address: one.versions[name] for one in answer.machines if one.versions is not None}
        if name in answer.versions:
            there["head"] = answer.versions[name]
        others = [f"{found} on {where}" for where, found in sorted(there.items()) if found != version]
        means = f"found {', '.join(others)}; install the same everywhere" if others else "the same on all that answered"
        checks.append(
            ClusterCheck(name=name, value=f"{version} here", meaning=means if there else "no other machine yet",
                         good=not others if there else None)
        )  # fmt: skip
    here = any(is_here(machine.address) for machine in answer.machines)
    join = "this machine is among them"
    if not here:
        join = "this machine is not among them; join as in 'moetool guide clusters', then check again"
    names = [f"{one.address} ({', '.join(one.servers) or 'no name'})" for one in answer.machines]
    checks.append(
        ClusterCheck(name="machines", value=", ".join(names) or "none has joined", meaning=join, good=here or None)
    )
    silent = [f"{one.address}: {one.trouble}" for one in answer.machines if one.trouble]
    if silent:
        checks.append(
            ClusterCheck(
                name="silent",
                value="; ".join(silent),
                meaning="open the ports of 'moetool guide clusters' between the machines, both ways",
                good=False,
            )
        )
    return checks


def _refusal(address: str, refusal: str, environment: Mapping[str, str]) -> str:
    if refusal != "token":
        return f"cannot query the Ray head at {address} ({refusal}); check it on its machine with: ray status"
    copy = "copy ~/.ray/auth_token from the head's machine to this one"
    mode = environment.get("RAY_AUTH_MODE", "")
    if mode and mode != "token":
        return f"the Ray head at {address} asks for a token, but RAY_AUTH_MODE is {mode} here; set RAY_AUTH_MODE=token"
    if not (source := token_source(environment)):
        return f"the Ray head at {address} asks for a token, but this machine has none; {copy}"
    return f"the Ray head at {address} does not accept the token in {source}; {copy}"


# -- in the separate process -------------------------------------------------------------------------------------------


def _ask(address: str, machines: bool) -> dict[str, Any]:
    from ray.exceptions import AuthenticationError, RpcError

    raylet: Any = importlib.import_module("ray._raylet")
    given, asks_token = os.environ.get("RAY_AUTH_MODE", "token"), False
    try:
        use_mode("disabled")
        try:
            client = raylet.GcsClient(address=address)
        except AuthenticationError:
            asks_token = True
            if given != "token" or not token_source(os.environ):
                return {"refusal": "token"}
            use_mode("token")
            client = raylet.GcsClient(address=address)
    except AuthenticationError:
        return {"refusal": "token"}
    except RpcError as error:
        return {"refusal": first_line(error)}
    kept = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=2) or b"{}")
    versions = {"Python": kept.get("python_version"), "Ray": kept.get("ray_version")}
    found: dict[str, Any] = {"asks_token": asks_token}
    found["versions"] = {name: version for name, version in versions.items() if version}
    nodes = [info for info in client.get_all_node_info(timeout=2).values() if info.state == _ALIVE]
    nodes.sort(key=lambda info: info.node_manager_address)
    found["machines"] = [
        {
            "address": info.node_manager_address,
            "servers": sorted(name.removeprefix(_NAME) for name in info.resources_total if name.startswith(_NAME)),
        }
        for info in nodes
    ]
    fits = all(found["versions"].get(name, own) == own for name, own in own_versions().items())
    if machines and fits and any(is_here(info.node_manager_address) for info in nodes):
        _ask_machines(address, {info.node_id.hex(): one for info, one in zip(nodes, found["machines"], strict=True)})
    return found


def _ask_machines(address: str, machines: Mapping[str, dict[str, Any]]) -> None:
    """Add the answer of each machine, by its Ray node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def versions() -> dict[str, str]:
        import platform

        import ray

        found = {"Python": platform.python_version(), "Ray": ray.__version__}
        try:
            from moetool import __version__ as own
        except ImportError:
            return {**found, "moetool": "none"}
        return {**found, "moetool": own}

    versions.__module__ = "__main__"  # Ray then sends its code, which a machine without moetool can run
    ray.init(address=address, logging_level="error", log_to_driver=False)
    task = ray.remote(versions)
    answers = {}
    for number in machines:
        where = NodeAffinitySchedulingStrategy(number, soft=False)
        answers[task.options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote()] = machines[number]
    there, late = ray.wait(list(answers), num_returns=len(answers), timeout=_MACHINES_S)
    for answer in there:
        try:
            answers[answer] |= {"versions": ray.get(answer), "trouble": ""}
        except Exception as error:
            answers[answer]["trouble"] = first_line(error)
    for answer in late:
        answers[answer]["trouble"] = f"no answer in {_MACHINES_S:g} s"


def use_mode(mode: str) -> None:
    """Switch this process's use of Ray tokens.

    Args:
        mode: as in RAY_AUTH_MODE.
    """
    raylet: Any = importlib.import_module("ray._raylet")
    os.environ["RAY_AUTH_MODE"] = mode
    raylet.Config.initialize("")  # Ray reads its environment only once
    raylet.AuthenticationTokenLoader.instance().reset_cache()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_ask(sys.argv[1], "machines" in sys.argv[2:])) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Ray's threads may wait for a head that does not answer
