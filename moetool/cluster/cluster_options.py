"""Options of a cluster, and its token."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moetool.errors import UsageError, first_line


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of `moetool serve --cluster … --set cluster.NAME=VALUE`.

    Attributes:
        emulate_links: whether servers send to each other no faster than the plan's links allow.
        call_timeout_s, hedge_s, fetch_timeout_s, last_resort: as for `moetool.cluster.edge.placed_experts.CallOptions`.
        slots: of each server's pool, 0: one for each expert that the plan's cluster gives it room for. With fewer, the
            least recently used lie on its disk.
        ping_s: how often each server is asked whether it is well.
        hang_s: a server that does not answer for so long is killed and started anew.
        start_timeout_s: for a server to read the model and to serve.
        peer_port: where the first server listens for the others; the next has the next one (0: any free ones).
        token_file: whose content is the cluster's token (empty: $MOETOOL_CLUSTER_TOKEN, or one made for this run).
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
    token_file: str = ""

    def __post_init__(self) -> None:
        for name in ("call_timeout_s", "fetch_timeout_s", "ping_s", "hang_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"cluster.{name} is {getattr(self, name)}, expected more than 0")
        if not 0 <= self.hedge_s < float("inf"):
            raise UsageError(f"cluster.hedge_s is {self.hedge_s}, expected seconds, 0 or more")
        if not 0 <= self.peer_port < 2**16:
            raise UsageError(f"cluster.peer_port is {self.peer_port}, expected 0 to {2**16 - 1}")
        if self.slots < 0:
            raise UsageError(f"cluster.slots is {self.slots}, expected 0 or more")


def read_token(options: ClusterOptions, environment: Mapping[str, str]) -> bytes:
    """The cluster's token: of the file that the options name, of $MOETOOL_CLUSTER_TOKEN, or a new one.

    Raises:
        UsageError: the file cannot be read, or the token is too short to keep anybody out.
    """
    where, text = "$MOETOOL_CLUSTER_TOKEN", environment.get("MOETOOL_CLUSTER_TOKEN", "")
    if options.token_file:
        where = options.token_file
        try:
            text = Path(options.token_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the cluster's token from {where}: {first_line(error)}") from None
    elif not text:
        return secrets.token_bytes(32)
    token = text.strip().encode()
    if len(token) < 16:
        raise UsageError(f"the cluster's token in {where} has {len(token)} characters, expected at least 16")
    return token
