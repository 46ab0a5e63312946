"""Options of a cluster."""

from dataclasses import dataclass

from moetool.base.config import Span, require_within


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of `moetool serve --cluster … --set cluster.NAME=VALUE`.

    Attributes:
        emulate_links: whether to limit traffic between servers to the plan's link rates.
        call_timeout_s: seconds until a call to another server is aborted and repeated at the next one.
        hedge_s: seconds until a call is also sent to another server; longer where calls usually take longer
            (`Peers.usual_s`). 0: never.
        poll_s: seconds of polling for the answer to a call before the calling thread sleeps (0: never, the default of
            `local:N` with at most one core per server). Waking it on an idle core can take longer than the call.
        fetch_timeout_s: seconds until the transfer of an expert is aborted; it is then read from disk.
        last_resort: whether a server reads an expert that no server holds from its own disk, for the current event;
            otherwise the forward fails.
        slots: slots of each server's pool; 0: one per expert that fits in the plan's cluster. With fewer, the least
            recently used experts stay on disk.
        ping_s: seconds between health checks of each server.
        hang_s: seconds without an answer after which a server is killed and restarted.
        start_timeout_s: seconds for a server to read the model and start serving.
        peer_port: port of the first server for other servers; the next server has the next port (0: any free ones).
        control_port: port of the first server for the head; the next server has the next port (0: any free ones).
        name: name of the cluster, by which the next head finds the servers of an earlier one (default: by `--port`).
        orphan_s: seconds without a call from a head after which a server ends.
    """

    emulate_links: bool = False
    call_timeout_s: float = 10.0
    hedge_s: float = 0.25
    poll_s: float = 0.005
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
        require_within(self, "cluster.", start_timeout_s=time, hedge_s=amount, poll_s=amount)
        port = Span(0, 2**16 - 1)
        require_within(self, "cluster.", slots=amount, peer_port=port, control_port=port, orphan_s=amount)
