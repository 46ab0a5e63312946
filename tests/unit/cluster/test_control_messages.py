"""Values that heads and workers send each other, and what is refused."""

import json
import socket
from typing import Any

import numpy as np
import pytest

from moetool.cluster.control_messages import from_plain, receive_message, send_message, to_plain
from moetool.cluster.edge.protocol import ArrivedExpert, ExpertLocations, ExpertLocationsUpdate, WorkerStats
from moetool.cluster.edge.worker import WorkerSettings
from moetool.cluster.frames import FrameConnection, LinkError, pack
from moetool.runtime.serve_options import ServeOptions
from tests.identities import NOBODY
from tests.refusals import refused


def _sent(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value))))


def test_values_arrive_as_they_were() -> None:
    settings = WorkerSettings(
        server=1,
        model="m",
        revision="r",
        content={"a": "b"},
        held=((0, 1), (2, 3)),
        capacity=4,
        identity=NOBODY,
        distance=(0.0, float("inf")),
        links={0: (1e6, 0.5)},
        options=ServeOptions(policy={"alpha": 0.5}),
    )
    holders = ExpertLocations(version=3, servers_LE=(((0, 1), ()),), peers=(("host", 7), None))
    change = ExpertLocationsUpdate(base=3, version=4, servers={(0, 1): (2,)}, peers=(None, ("host", 7)))
    for value in (settings, holders, change, [ArrivedExpert(source=-1, bytes=2, seconds=0.5), "not here"], None, True):
        assert _sent(value) == value
    for value in ((), ((),), ((1, 2), ()), ((1, True),), ((1, 2.0), (3,)), ((1,), "a"), (((1,),), ((2, 3),))):
        assert repr(_sent(value)) == repr(value)
    counts_LE = np.arange(6).reshape(2, 3)
    stats = WorkerStats(
        server=0,
        seconds=1.5,
        tokens_LE=counts_LE,
        local_pairs=1,
        remote_pairs=2,
        expert_s=0.1,
        expert_pairs=3,
        call_s={2: 0.25},
    )
    found = _sent(stats)
    assert found.call_s == {2: 0.25} and found.tokens_LE.dtype == counts_LE.dtype
    assert (found.tokens_LE == counts_LE).all() and found.tokens_LE.flags.writeable


def test_what_has_no_plain_form_is_not_sent() -> None:
    for value in (object(), {1, 2}, [print], np.array([object()])):
        with refused(TypeError, "sent", "worker"):
            to_plain(value)


@pytest.mark.parametrize(
    "data",
    [
        {"dataclass": "os:system", "fields": {}},
        {"dataclass": "moetool.cluster.launch:subprocess", "fields": {}},
        {"dataclass": "moetool.cluster.launch:Workers", "fields": {}},
        {"dataclass": "moetool.cluster.launch:Where", "fields": {"shell": "x"}},
        {"dataclass": "moetool.nothing:Where", "fields": {}},
        {"array": "AAAA", "dtype": "O", "shape": [1]},
        {"object": 1},
        {},
        {"tuple": 1},
        [1, 2],
    ],
)
def test_what_is_no_value_is_no_message(data: Any) -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    mine, theirs = FrameConnection(_Tcp(here), 2**20), FrameConnection(_Tcp(there), 2**20)  # type: ignore[arg-type]
    send_message(mine, {"good": (1,)})
    assert receive_message(theirs) == {"good": (1,)}
    text = json.dumps({"mapping": [["value", data]]} if isinstance(data, dict) else data).encode()
    mine.send(pack({}, [text]), [text], float("inf"))
    with pytest.raises(LinkError, match="cannot be read"):
        receive_message(theirs)
    mine.close()
    theirs.close()


class _Tcp:
    """A local socket that takes TCP's options."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def setsockopt(self, *_: Any) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
