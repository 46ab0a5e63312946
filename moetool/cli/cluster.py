"""`moetool serve --cluster`: the servers of a placement plan, on this machine or on machines that Ray has joined."""

import contextlib
import ipaddress
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetool.base import garbage, tables
from moetool.base.config import parse
from moetool.base.errors import UsageError, unknown_name
from moetool.cli.cluster_command import ClusterCommand
from moetool.cli.cluster_logs import folder_name, log_location, open_folder
from moetool.cli.watch import SchedulerWithPage

if TYPE_CHECKING:
    from moetool.cluster.fork_server import ForkServer
    from moetool.cluster.launch import ClusterAddress


def serve_cluster(command: ClusterCommand) -> None:
    """Serve a model on a cluster until an interruption. Raises: UsageError: an unsupported option."""
    from moetool.cluster.launch import parse_where

    if command.mode not in MODES:
        raise unknown_name("--mode", command.mode, MODES)
    where = parse_where(command.cluster)
    if command.plan is None:
        raise UsageError("--cluster needs a placement plan; give --plan FILE, made with: moetool plan placement")
    if given := [name for name, is_given in command.refused.items() if is_given]:
        raise UsageError(f"{given[0]} has no effect with --cluster: the plan places the experts; leave it out")
    with _ended_as_interrupted():
        MODES[command.mode](command, where)


def require_no_placement(plan: Path) -> None:
    """Raises: UsageError if a placement plan was given to serve on one machine."""
    from moetool.base.errors import MismatchError
    from moetool.placement.plan import PlacementPlan

    try:
        num_servers = len(PlacementPlan.load(plan).cluster.servers)
    except (UsageError, MismatchError):
        return  # the error of reading it as a cache plan says more
    raise UsageError(f"{plan} is a placement plan for several servers; serve it with --cluster local:{num_servers}")


def _edge(command: ClusterCommand, where: "ClusterAddress") -> None:
    """Serve by edge servers that call each other's experts; each has its own endpoint."""
    from moetool.cluster.launch import prepare
    from moetool.cluster.ray_launch import head_address

    if command.predictor is not None:
        raise UsageError("--predictor has no effect with --cluster in mode edge, which follows the plan; leave it out")
    if command.profile is not None:
        raise UsageError("--profile has no effect with --cluster in mode edge, which measures its calls; leave it out")
    threads = max(1, (os.cpu_count() or 1) // where.count) if where.count else 0
    toward = head_address(where.address)  # before imports that take seconds
    with contextlib.ExitStack() as stack:
        if fork_server := prepare(where, "moetool.cluster.edge.worker", threads):  # it imports while this process does
            stack.callback(fork_server.close)
        _serve_edge(command, where, toward, threads, fork_server)


def _serve_edge(
    command: ClusterCommand, where: "ClusterAddress", toward: str, threads: int, fork_server: "ForkServer | None"
) -> None:

    from moetool.cluster.cluster_options import ClusterOptions
    from moetool.cluster.edge.edge_head import EdgeHead
    from moetool.cluster.edge.server_settings import Endpoints, beyond_reserved, worker_settings
    from moetool.cluster.edge.worker import Worker
    from moetool.cluster.launch import Detached, Workers
    from moetool.models.checkpoint import Checkpoint
    from moetool.models.loading import device_kind, served_dtype
    from moetool.runtime.serve_options import ServeOptions
    from moetool.serving.server import address_of, open_to_all
    from moetool.serving.server_options import ServerOptions

    plan = command.plan_for(where, "servers", lambda cluster: [server.name for server in cluster.servers])
    names = [server.name for server in plan.cluster.servers]
    values = dict(command.values)
    given = values.pop("cluster", {})
    own = parse(ClusterOptions, given, "--set cluster")
    if (where.count or 0) >= (os.cpu_count() or 1) and "poll_s" not in given:
        own = replace(own, poll_s=0.0)  # a server that polls would take a core from another
    _require_any_machine(command.host, toward)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(open_folder(own.name or folder_name(command.port), "servers"))
        living = folder.living()
        if not living:
            folder.scheduler_state.unlink(missing_ok=True)  # of a cluster without living servers
        watch = SchedulerWithPage(values, plan, lambda line: tables.narrate(f"moetool: {line}"), folder.scheduler_state)
        limits = parse(ServerOptions, values.pop("server", {}), "--set server")
        options = parse(ServeOptions, values, "--set")
        checkpoint = Checkpoint.open(command.model)
        if "dtype" not in values:
            options = replace(options, dtype=served_dtype(checkpoint, device_kind(options.device))[0])
        settings = worker_settings(
            checkpoint,
            plan,
            identify=folder.identity,
            endpoints=Endpoints(host=command.host, port=command.port, api_key=command.api_key, toward=toward),
            options=options,
            limits=limits,
            cluster=own,
        )
        folder.require_same(settings, living)
        for name, (needs, has) in beyond_reserved(checkpoint, plan, options).items():
            tables.narrate(
                f"moetool: warning: the dense weights and the KV cache of server {name} take "
                f"{tables.count(needs, 'B')}, and the plan's cluster reserves {tables.count(has, 'B')} for them"
            )
        if warning := open_to_all(address_of(command.host), command.api_key):
            tables.narrate(f"moetool: {warning}")
        if _only_here(command.host) and not _only_here(settings[0].toward or command.host):
            tables.narrate(
                f"moetool: warning: --host {command.host} makes each server reachable from its own machine "
                f"only; --host 0.0.0.0 --api-key KEY admits others"
            )
        settings = watch.with_saved_placement(settings)
        there = [name for name in names if name in living]
        if there:
            tables.narrate(f"moetool: cluster {folder.name} serves without a head; taking over {', '.join(there)}")
        if len(there) < len(names):
            tables.narrate(f"moetool: starting {len(names) - len(there)} servers{log_location(folder, where.count)}")
        stack.callback(watch.close)
        watch.open(limits.allowed_hosts)  # first: a busy port must not end servers that were taken over
        workers = Workers(
            where,
            Worker,
            [{"settings": one} for one in settings],
            names,
            threads=threads,
            fork_server=fork_server,
            late=True,
            detached=Detached(folder=folder, living=living, orphan_s=own.orphan_s, port=own.control_port),
        )
        head = EdgeHead(
            workers,
            settings,
            names,
            plan.spec.num_experts_L,
            options=own,
            narrate=lambda line: tables.narrate(f"moetool: {line}"),
            scheduler=watch.scheduler,
        )
        stack.callback(head.close)
        interrupts = stack.enter_context(_interrupts())
        if not interrupts.during(lambda: head.start(taken_over=bool(there)), stop_at=1):
            return
        garbage.as_usual()
        for info in filter(None, head.infos()):
            tables.narrate(
                f"moetool: {names[info.server]} is serving on {info.url}/v1 with {len(info.held)} of "
                f"{plan.spec.total_experts} experts, room for {info.slots}"
            )
        if own.orphan_s:
            tables.narrate(
                f"moetool: cluster {folder.name}: its servers outlive this process by {own.orphan_s:g} s; the same "
                f"command{'' if command.port else f' with --set cluster.name={folder.name}'} takes them over"
            )
        interrupts.wait()
        tables.narrate("moetool: finishing the running requests; press Ctrl-C again to stop at once")
        interrupts.during(lambda: head.drain(limits.drain_timeout_s + 15.0), stop_at=2)


def _only_here(host: str) -> bool:
    from moetool.serving.server import address_of

    return ipaddress.ip_address(address_of(host).partition("%")[0]).is_loopback


def _require_any_machine(host: str, toward: str) -> None:
    """Raises: UsageError where servers on several machines would all listen at one machine's address."""
    from moetool.serving.server import address_of

    address = ipaddress.ip_address(address_of(host).partition("%")[0])
    if toward and not _only_here(toward) and not address.is_loopback and not address.is_unspecified:
        raise UsageError(
            f"--host {host} is an address of one machine, and each server is on its own; give --host 0.0.0.0, every "
            f"address of it"
        )


def _ep(command: ClusterCommand, where: "ClusterAddress") -> None:
    """Serve by expert parallelism: ranks in lockstep behind one endpoint."""
    from moetool.cli.parallel import serve_parallel

    serve_parallel(command, where)


MODES: dict[str, Callable[[ClusterCommand, "ClusterAddress"], None]] = {"edge": _edge, "ep": _ep}
"""Values of `--mode`."""


@contextmanager
def _ended_as_interrupted() -> Iterator[None]:
    """Have SIGTERM and a closed terminal end a start as Ctrl-C does, so that all processes end in order."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]

    def end(*_: Any) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


class _Interrupts:
    """Counts interruptions: Ctrl-C, SIGTERM and a closed terminal."""

    def __init__(self) -> None:
        self._count = 0

    def hear(self, *_: Any) -> None:
        self._count += 1

    def wait(self) -> None:
        """Block until the first interruption."""
        while not self._count:
            time.sleep(0.1)

    def during(self, work: Callable[[], object], stop_at: int) -> bool:
        """Run work on another thread; return whether it finished before this many interruptions.

        Raises: exceptions of the work.
        """
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=run, daemon=True).start()  # abandoned after too many interruptions
        while self._count < stop_at:
            if wait([done], timeout=0.1).done:
                done.result()
                return True
        return False


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    interrupts = _Interrupts()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupts.hear) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
