"""Options of a cluster."""

from dataclasses import dataclass

from moetool.config import Span, require_within


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of `moetool serve --cluster … --set cluster.NAME=VALUE`.

    Attributes:
        emulate_links: whether servers send to each other no faster than the plan's links allow.
        call_timeout_s: seconds until a call to another server is given up and tried elsewhere.
        hedge_s: until a call is tried elsewhere too, at least; longer where such calls take longer (`Peers.usual_s`).
            0: never.
        fetch_timeout_s: as `call_timeout_s`, for an expert that moves to another server.
        last_resort: an expert that no server gives is read from the own disk for the event at hand; without it, the
            forward fails.
        slots: of each server's pool, 0: one for each expert that the plan's cluster gives it room for. With fewer, the
            least recently used lie on its disk.
        ping_s: how often each server is asked whether it is well.
        hang_s: a server that does not answer for so long is killed and started anew.
        start_timeout_s: for a server to read the model and to serve.
        peer_port: where the first server listens for the others; the next has the next one (0: any free ones).
        control_port: where the first server listens for the head; the next has the next one (0: any free ones).
        name: of the cluster, by which the next head finds the servers of one that has gone (default: by `--port`).
        orphan_s: a server that no head has called for so long ends by itself.
    """

    emulate_links: bool = False
    call_timeout_s: float = 10.0
    hedge_s: float = 0.25
    fetch_timeout_s: float = 60.0
    last_resort: bool = True
    slots: int = 0
    ping_s: float = 1.0
    hang_s: float = 10.0
    start_timeout_s: float = 300.0
    peer_port: int = 0
    control_port: int = 0
    name: str = ""
    orphan_s: float = 600.0

    def __post_init__(self) -> None:
        time, amount = Span(0, above=True), Span(0, below=True)
        require_within(self, "cluster.", call_timeout_s=time, fetch_timeout_s=time, ping_s=time, hang_s=time)
        require_within(self, "cluster.", start_timeout_s=time, hedge_s=amount, slots=amount)
        port = Span(0, 2**16 - 1)
        require_within(self, "cluster.", peer_port=port, control_port=port, orphan_s=amount)
