"""Workers as Ray actors: started, placed one a server, called, watched and restarted.

Ray carries calls of control only: how a worker is to be built, its statistics, what to hold. Tensors and tokens go
over the workers' own connections (a Ray call takes milliseconds).

A machine that cannot be reached for about a minute is given up by Ray, which then ends its own processes there: it has
to be joined again, by the same `ray start`, and gets its server back. What it is given up after is the head's to say
(`RAY_health_check_failure_threshold` where `ray start --head` is called).
"""

import contextlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moetool.cluster.ray_check import ask_head, require_fitting, use_mode
from moetool.cluster.ray_hosts import choose, head_of
from moetool.cluster.ray_reaper import RaySession
from moetool.errors import CapacityError, MoetoolError, UsageError, first_line

_LOG = logging.getLogger(__name__)

_STORE_BYTES = 80 * 2**20
"""Ray's shared memory, which nothing here uses; less it does not take."""


class WorkerDied(MoetoolError):
    """The process of a worker has ended, or its machine cannot be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The meaning of `--cluster`.

    Attributes:
        count: workers on this machine (`local:3`), or None for machines that have joined with `ray start`.
        address: of the Ray head that they have joined, or None.
    """

    count: int | None = None
    address: str | None = None


def parse_where(text: str) -> Where:
    """`local:N`, or the address of a Ray head. Raises: UsageError."""
    kind, _, rest = text.partition(":")
    if kind == "local":
        if not rest.isdecimal() or int(rest) < 1:
            raise UsageError(f"--cluster {text!r} lacks the number of servers; write e.g. local:3")
        return Where(count=int(rest))
    if not kind or not rest.isdecimal():
        raise UsageError(f"--cluster {text!r} is neither local:N nor the host:port that 'ray start --head' printed")
    return Where(address=text)


class Workers:
    """One worker a server.

    A worker is what `build(**arguments)` gives in its own process; its methods are called by name, from several
    threads at once. A method `close()` is called at the end.

    Args:
        build: a function or class of a module (Ray sends its name, not its code, where it is installed on both sides).
        arguments: for each server, of `build`. They must pickle.
        names: of the servers. A machine that was started with `ray start --resources '{"moetool:NAME": 1}'` gets the
            server of that name; the others get theirs in the order of their addresses (`machines.choose`).
        threads: of arithmetic, for each worker's libraries (0 leaves it to them).
        late: whether servers for which no machine has joined yet are left out until `restart` finds one.

    Effects: starts Ray (`local:N`) or joins it, and the processes. `close` ends them, and a Ray that was started here;
    so does the end of this process, by SIGKILL too (`RaySession`).

    Raises:
        UsageError: Ray is not installed, or there is no head at the address.
        CapacityError: fewer machines than servers, and not `late`; none at all.
    """

    def __init__(
        self,
        where: Where,
        build: Callable[..., Any],
        arguments: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        *,
        threads: int = 0,
        late: bool = False,
    ) -> None:
        self._build, self._arguments = build, [dict(one) for one in arguments]
        self._ray = require_ray()
        self._own = not self._ray.is_initialized()
        self._session = _connect(self._ray, where) if self._own else None
        self._names, self._threads = tuple(names), threads
        self._joined = where.address is not None
        self._nodes: list[str | None] = [None] * len(names)
        self._lock = threading.Lock()
        self._actors: list[Any] = [None] * len(names)
        self._generation = [0] * len(names)
        self._killed = [False] * len(names)
        self._closing = threading.Event()
        self._watchers: list[threading.Thread] = []
        try:
            for n in range(len(names)):
                try:
                    self._start(n)
                except CapacityError:
                    if not late:
                        raise
            if not any(self._actors):
                raise CapacityError(f"no machine has joined the Ray head at {where.address} for a server")
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._names)

    def is_started(self, n: int) -> bool:
        """Whether there is, or was, a process for a worker."""
        return self._actors[n] is not None

    def call(self, n: int, method: str, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Any:
        """Call a method of worker `n` and wait for its answer.

        Raises:
            WorkerDied: before it answered.
            MoetoolError: no answer in time.
            Exception: the method's own exception.
        """
        return self._answer(n, self._actor(n).call.remote(method, args, kwargs), method, timeout_s)

    def pid(self, n: int) -> int:
        """The process of a worker, on its own machine. Raises: WorkerDied."""
        pid: int = self._answer(n, self._actor(n).pid.remote(), "pid", 60.0)
        return pid

    def restart(self, n: int, arguments: Mapping[str, Any] | None = None) -> None:
        """Replace a worker's process.

        Args:
            arguments: of `build`, in place of those of before.

        Raises:
            CapacityError: no machine is there for it.
        """
        if arguments is not None:
            self._arguments[n] = dict(arguments)
        self.kill(n)
        self._start(n)

    def kill(self, n: int) -> None:
        """End a worker at once, if it has not ended. Nothing that is called on it from now on reaches it."""
        with self._lock:
            self._generation[n] += 1  # a requested end is not reported
            self._killed[n] = True  # Ray ends the process a little later, and would have it answer until then
        if self._actors[n] is not None:
            _LOG.info("ending the process of %s", self._names[n])
            self._ray.kill(self._actors[n], no_restart=True)

    def close(self) -> None:
        """Close every worker that lives, end the processes, and Ray if it was started here."""
        self._closing.set()
        closing = [(n, actor, actor.call.remote("close", (), {})) for n, actor in enumerate(self._actors) if actor]
        for n, _, answer in closing:
            try:
                self._answer(n, answer, "close", 20.0)
            except Exception:
                continue  # it is ended below, whatever state it is in
        for _, actor, _ in closing:
            self._ray.kill(actor, no_restart=True)
        if self._own:
            self._ray.shutdown()
        if self._session is not None:
            self._session.close()
        for watcher in self._watchers:
            watcher.join(timeout=5.0)

    def _start(self, n: int) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 16}
        if self._joined:
            taken = {*self._nodes[:n], *self._nodes[n + 1 :]}
            self._nodes[n] = choose(self._names[n], self._nodes[n], taken, self._ray.nodes())
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._nodes[n], soft=False)
        if self._threads:
            options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(self._threads)}}
        self._actors[n] = self._ray.remote(_Host).options(**options).remote(self._build, self._arguments[n])
        self._killed[n] = False
        _LOG.info("started a process for %s on %s", self._names[n], self._nodes[n] or "this machine")

    def watch(self, n: int, on_death: Callable[[int], None]) -> None:
        """Call `on_death(n)`, on a thread of this class, when the present process of a worker ends by itself."""
        generation, actor = self._generation[n], self._actors[n]

        def wait() -> None:
            end = actor.until_end.remote()
            while not self._closing.is_set():
                ended, _ = self._ray.wait([end], timeout=0.5)
                if ended:
                    break
            if self._closing.is_set() or self._generation[n] != generation:
                return
            _LOG.info("the process of %s has ended", self._names[n])
            on_death(n)

        watcher = threading.Thread(target=wait, name=f"watch-{n}", daemon=True)
        self._watchers.append(watcher)
        watcher.start()

    def _actor(self, n: int) -> Any:
        if self._actors[n] is None:
            raise WorkerDied(f"no machine has joined for server {self._names[n]}")
        if self._killed[n]:
            raise WorkerDied(f"server {self._names[n]} has ended (it was killed)")
        return self._actors[n]

    def _answer(self, n: int, answer: Any, method: str, timeout_s: float) -> Any:
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return self._ray.get(answer, timeout=timeout_s)
        except GetTimeoutError:
            _LOG.info("%s did not answer %s in %g s", self._names[n], method, timeout_s)
            raise MoetoolError(f"server {self._names[n]} did not answer {method} in {timeout_s:g} s") from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, MoetoolError):
                raise cause from None
            raise
        except RayActorError as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            # What ended its building is at the end of a traceback that Ray puts into the text.
            reason = lines[-1].strip() if "creation task" in lines[0] else lines[0]
            raise WorkerDied(f"server {self._names[n]} has ended ({reason})") from None


class _Host:
    """The Ray actor around a worker."""

    def __init__(self, build: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._worker = build(**arguments)
        self._ended = threading.Event()

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)

    def pid(self) -> int:
        return os.getpid()

    def until_end(self) -> None:
        """Block until the process exits."""
        self._ended.wait()


def head_address(where: Where) -> str:
    """The address of the Ray head's machine, as the machines that have joined know it; empty for `local:N`.

    Effects: joins Ray and leaves it again.

    Raises:
        UsageError: there is no head at the address, or it is not the same to all machines.
    """
    if where.address is None:
        return ""
    ray = require_ray()
    own = not ray.is_initialized()
    if own:
        _connect(ray, where)
    try:
        return head_of(ray.nodes())
    finally:
        if own:
            ray.shutdown()


def _connect(ray: Any, where: Where) -> RaySession | None:
    """Start Ray, whose session is given, or join it. Raises: UsageError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # a server is no background job, which Ray takes it for
    common: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
    if where.address is None:
        # Without an address it would join whatever Ray runs on this machine.
        given = {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        session = RaySession()
        try:
            with _sigterm_kept(), _own_token():
                ray.init(address="local", _temp_dir=str(session.folder), **given, **common)
        except BaseException:
            session.close()
            raise
        return session
    answer = ask_head(where.address)
    require_fitting(where.address, answer)
    if answer.asks_token:
        use_mode("token")
    try:
        with _sigterm_kept():
            ray.init(address=where.address, **common)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"cannot join the Ray head at {where.address} ({first_line(error)})") from None
    return None


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """Have a Ray that starts here ask for a token of its own, unless the environment says which.

    By itself it would leave one in `~/.ray`, which a head that is started there later would ask of every machine.
    """
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in names):
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    use_mode("token")
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Leave it to this process what a SIGTERM does: with Ray's own handler it aborts, and nothing is closed."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say it
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # it was set by what is no Python
            signal.signal(signal.SIGTERM, before)


def require_ray() -> Any:
    """The module `ray`. Raises: UsageError where it is not installed."""
    # It would print, where data goes, what `watch` tells, and pages of its logs about it.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed|The node with node|Raylet is term")
    try:
        import ray
    except ImportError:
        raise UsageError("clusters need Ray; install it with: pip install 'moetool[cluster]'") from None
    return ray
