"""Joint forwards of several requests with separate caches: they run some of the model's modules together.

Every forward has its own thread, and one runs at a time. It waits at each module where forwards meet. When all have
arrived, the thread of `JointForwards.run` calls the module once with the concatenated tokens.

The threads are kept between runs, because OpenMP builds a team of compute threads for each. So N requests hold up to
N + 1 teams, of which one works at a time. With a single team each forward, attention included, would have one compute
thread.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moetool.base.errors import UsageError
from moetool.models.experts.expert_form import Call
from moetool.models.experts.moe_layers import moe_layers

_KINDS: dict[type, type] = {}


class JointForwards:
    """Joint forwards of several requests, which meet at the MoE layers, the embedding and the head of a model.

    Effects: during `run` these modules have another class; their hooks run on its thread and see all tokens.
    Keeps one thread for each forward of the newest run, until `close`.
    """

    def __init__(self, model: Any) -> None:
        self._local = threading.local()  # its `forward` is the thread's
        self._threads: list[_Forward] = []
        self._modules = _joint_modules(model)

    def close(self) -> None:
        """End the threads."""
        self._keep(0)

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run forwards together; returns their results.

        Raises:
            Exception: the error of the first failed forward; the others end too.
        """
        if len(works) == 1:
            self._keep(0)
            return [works[0]()]
        joined: list[Any] = []
        try:
            self._keep(len(works))
            for forward, work in zip(self._threads, works, strict=True):
                forward.begin(work)
            for module in self._modules:
                module.moetool_joint_forwards = self
                module.__class__ = _joining(type(module))
                joined.append(module)
            running = list(self._threads)
            while running:
                for forward in running:
                    forward.go_on()
                running = [forward for forward in running if forward.call is not None]
                waiting = list(running)
                while waiting:
                    module = waiting[0].call[0]  # type: ignore[index]
                    together = [forward for forward in waiting if forward.call[0] is module]  # type: ignore[index]
                    waiting = [forward for forward in waiting if forward not in together]
                    _call(module, together)
            return [forward.take() for forward in self._threads]
        finally:
            for forward in self._threads:
                if not forward.idle:
                    forward.end()
            self._threads = [forward for forward in self._threads if forward.idle]
            for module in joined:
                module.__class__ = type(module).__bases__[0]
                del module.moetool_joint_forwards

    def _keep(self, count: int) -> None:
        """End threads, or start them, until there are `count`."""
        while len(self._threads) > count:
            self._threads.pop().end()
        while len(self._threads) < count:
            self._threads.append(_Forward(self._local))

    def joined(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `module` jointly with the other forwards, if any; returns this forward's output."""
        forward: _Forward | None = getattr(self._local, "forward", None)
        if forward is None:
            return _plain(module, args, kwargs)
        return forward.wait_for(module, args, kwargs)


class _Ended(BaseException):
    """Unwinds a forward that is no longer needed."""


class _Forward:
    """A thread that runs one forward after another, each only while `go_on` waits.

    Attributes:
        call: the module that its forward waits for, with its arguments; None if it has ended.
        output: result of that call.
    """

    def __init__(self, local: threading.local) -> None:
        self._local = local
        self._resume, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self.call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        self.output: Any = None
        self._work: Callable[[], Any] | None = None
        self._made: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether its forward has ended, or none has begun."""
        return self._work is None

    def begin(self, work: Callable[[], Any]) -> None:
        """Take a forward, which starts with `go_on`."""
        self._work, self._made = work, None

    def go_on(self) -> None:
        """Let the forward run until it waits for a module or ends. Raises: BaseException: its error."""
        self.call = None
        self._resume.release()
        self._paused.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def take(self) -> Any:
        """Return the forward's result, once."""
        made, self._made = self._made, None
        return made

    def end(self) -> None:
        """End the thread at once."""
        self._ended = True
        self._resume.release()
        self._thread.join()

    def wait_for(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand over a call and return its output, on the forward's thread."""
        if self._ended:
            raise _Ended
        self.call = (module, args, kwargs)
        self._paused.release()
        self._resume.acquire()
        if self._ended:
            raise _Ended
        output, self.output = self.output, None
        return output

    def _run(self) -> None:
        self._local.forward = self
        while True:
            self._resume.acquire()
            if self._ended or self._work is None:
                return
            try:
                with torch.inference_mode():
                    self._made = self._work()
            except _Ended:
                return
            except BaseException as error:
                self._error = error
            self._work = None
            self._paused.release()


def _joint_modules(model: Any) -> list[Any]:
    """The embedding, every MoE block, and the head.

    Router and experts directly in the decoder layer, beside its attention, are two points.
    """
    points = [model.get_input_embeddings()]
    for layer in moe_layers(model):
        above = layer.path.rpartition(".")[0]
        if layer.form.call is Call.BLOCK:
            points.append(layer.experts)
        elif above.rpartition(".")[2].isdecimal():
            points += [layer.router, layer.experts]
        else:
            points.append(model.get_submodule(above))
    return [*points, model.get_output_embeddings()]


def _joining(kind: type) -> type:
    """A class like `kind` whose calls are joined."""
    if kind not in _KINDS:

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.moetool_joint_forwards.joined(self, args, kwargs)

        _KINDS[kind] = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    return _KINDS[kind]


def _plain(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return type(module).__bases__[0].__call__(module, *args, **kwargs)


def _call(module: Any, forwards: Sequence[_Forward]) -> None:
    """Call a module once for all waiting forwards, and split its output between them.

    Raises:
        UsageError: the calls differ in more than the tokens of their tensors.
    """
    calls = [{**dict(enumerate(call[1])), **call[2]} for forward in forwards if (call := forward.call) is not None]
    names = list(calls[0])
    if any(call.keys() != calls[0].keys() for call in calls):
        raise _mismatched_calls(module, "different arguments", [sorted(map(str, call)) for call in calls])
    values = {name: [call[name] for call in calls] for name in names}
    tensors = [name for name in names if all(isinstance(value, torch.Tensor) and value.ndim for value in values[name])]
    sizes: list[int] = []
    for name in names:
        if name not in tensors:
            if not all(_same(values[name][0], value) for value in values[name]):
                raise _mismatched_calls(module, f"different {name}", values[name])
            continue
        # Hidden states are [1, T, D] or [T, D], choices [T, K]; token ids, alone or by keyword, are [1, T].
        ids = name == "input_ids" or (len(tensors) == 1 and not values[name][0].is_floating_point())
        dim = 1 if ids or values[name][0].ndim == 3 else 0
        found = [value.shape[dim] for value in values[name]]
        sizes = sizes or found
        if found == sizes:
            values[name] = [torch.cat(values[name], dim=dim)]
        elif any(value is not values[name][0] for value in values[name]):
            raise _mismatched_calls(module, f"different {name}", values[name])
    args = tuple(values[name][0] for name in names if isinstance(name, int))
    kwargs = {name: values[name][0] for name in names if isinstance(name, str)}
    with torch.inference_mode():
        output = _plain(module, args, kwargs)
    for forward, part in zip(forwards, _split(output, sizes), strict=True):
        forward.output = part


def _same(value: Any, other: Any) -> bool:
    """Whether two calls have the same argument; tensors, and tuples of them, must be the same object."""
    if value is other:
        return True
    parts = value if isinstance(value, tuple | list) else (value,)
    return not any(isinstance(part, torch.Tensor) for part in parts) and bool(value == other)


def _mismatched_calls(module: Any, difference: str, values: Sequence[Any]) -> UsageError:
    kind = type(module).__bases__[0].__name__
    found = " and ".join(dict.fromkeys(_describe(value) for value in values))
    return UsageError(
        f"{kind} cannot run for several requests at once, because the calls have {difference} ({found}); set "
        "max_requests to 1"
    )


def _describe(value: Any) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)[:60].replace("\n", " ")


def _split(output: Any, sizes: list[int]) -> list[Any]:
    if isinstance(output, torch.Tensor):
        return list(output.split(sizes, dim=1 if output.ndim == 3 else 0))
    if isinstance(output, tuple):
        return list(zip(*(_split(part, sizes) for part in output), strict=True))
    return [output] * len(sizes)
