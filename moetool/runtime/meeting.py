"""Forwards of several requests, each with its own cache, that meet at some modules of the model.

Every forward runs on a thread of its own, one at a time. At a module where all meet it waits; when all have come there,
the module is called once, on the thread of `Meeting.run`, with the tokens of all laid end to end.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moetool.models.expert_form import Call
from moetool.models.spec import moe_layers

_KINDS: dict[type, type] = {}


class Meeting:
    """Makes forwards meet at the MoE layers of a model, at its embedding and at its head.

    Effects: while `run` runs those modules have another class; their hooks run on its thread and see the tokens of all.
    """

    def __init__(self, model: Any) -> None:
        self._turn: dict[int, _Forward] = {}  # by thread
        self._modules = _meeting_points(model)

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run forwards together; gives what each returns.

        Raises:
            Exception: that of the first that failed; the others end there too.
        """
        if len(works) == 1:
            return [works[0]()]
        forwards = [_Forward(work, self._turn) for work in works]
        running = list(forwards)
        for module in self._modules:
            module.moetool_meeting = self
            module.__class__ = _joining(type(module))
        try:
            while running:
                for forward in running:
                    forward.go_on()
                    if forward.error is not None:
                        raise forward.error
                running = [forward for forward in running if forward.call is not None]
                waiting = list(running)
                while waiting:
                    module = waiting[0].call[0]  # type: ignore[index]
                    together = [forward for forward in waiting if forward.call[0] is module]  # type: ignore[index]
                    waiting = [forward for forward in waiting if forward not in together]
                    _call(module, together)
        finally:
            for forward in forwards:
                forward.stop()
            for module in self._modules:
                module.__class__ = type(module).__bases__[0]
                del module.moetool_meeting
        return [forward.made for forward in forwards]

    def joined(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a call of `module`, made together with the others' where there are others."""
        forward = self._turn.get(threading.get_ident())
        if forward is None:
            return _plain(module, args, kwargs)
        return forward.wait_for(module, args, kwargs)


class _Stopped(BaseException):
    """Unwinds a forward that nobody waits for."""


class _Forward:
    """One forward on a thread of its own, which runs only while `go_on` waits.

    Attributes:
        call: the module that it waits for, with its arguments; None where it has ended.
        output: of that call, before it goes on.
        made: what it has returned; error: what it has raised.
    """

    def __init__(self, work: Callable[[], Any], turn: dict[int, "_Forward"]) -> None:
        self._work, self._turn = work, turn
        self._resume, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self.call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        self.output: Any = None
        self.made: Any = None
        self.error: Exception | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Let it run until it waits for a module or ends."""
        self.call = None
        self._resume.release()
        self._paused.acquire()

    def stop(self) -> None:
        """End it wherever it is."""
        self._stopped = True
        self._resume.release()
        self._thread.join()

    def wait_for(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """On its own thread: hand a call over and give its output."""
        self.call = (module, args, kwargs)
        self._paused.release()
        self._resume.acquire()
        if self._stopped:
            raise _Stopped
        output, self.output = self.output, None
        return output

    def _run(self) -> None:
        self._resume.acquire()
        if self._stopped:
            return
        self._turn[threading.get_ident()] = self
        try:
            with torch.inference_mode():
                self.made = self._work()
        except _Stopped:
            pass
        except Exception as error:
            self.error = error
        finally:
            del self._turn[threading.get_ident()]
            self._paused.release()


def _meeting_points(model: Any) -> list[Any]:
    """The embedding, every MoE block, and the head.

    Where router and experts lie in the decoder layer itself, beside its attention, they are two points.
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
            return self.moetool_meeting.joined(self, args, kwargs)

        _KINDS[kind] = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    return _KINDS[kind]


def _plain(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return type(module).__bases__[0].__call__(module, *args, **kwargs)


def _call(module: Any, forwards: Sequence[_Forward]) -> None:
    """Call a module once for all forwards that wait for it, and hand out the parts of its output."""
    calls = [forward.call for forward in forwards if forward.call is not None]
    names = [*range(len(calls[0][1])), *calls[0][2]]
    values = {name: [call[1][name] if isinstance(name, int) else call[2][name] for call in calls] for name in names}
    tensors = [name for name in names if isinstance(values[name][0], torch.Tensor)]
    sizes: list[int] = []
    for name in tensors:
        # Hidden states are [1, T, D] or [T, D], choices [T, K]; token ids come alone, or under their name, as [1, T].
        ids = name == "input_ids" or (len(tensors) == 1 and not values[name][0].is_floating_point())
        dim = 1 if ids or values[name][0].ndim == 3 else 0
        sizes = sizes or [value.shape[dim] for value in values[name]]
        values[name] = [torch.cat(values[name], dim=dim)]
    args = tuple(values[name][0] for name in names if isinstance(name, int))
    kwargs = {name: values[name][0] for name in names if isinstance(name, str)}
    with torch.inference_mode():
        output = _plain(module, args, kwargs)
    for forward, part in zip(forwards, _split(output, sizes), strict=True):
        forward.output = part


def _split(output: Any, sizes: list[int]) -> list[Any]:
    if isinstance(output, torch.Tensor):
        return list(output.split(sizes, dim=1 if output.ndim == 3 else 0))
    if isinstance(output, tuple):
        return list(zip(*(_split(part, sizes) for part in output), strict=True))
    return [output] * len(sizes)
