"""Choice of machines for servers among those that joined a Ray head, and the head's address.

Machines are described as by `ray.nodes()`.
"""

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moetool.base.errors import CapacityError, UsageError
from moetool.base.tables import numbered

_NAME = "moetool:"
_HEAD = "node:__internal_head__"


def choose(name: str, before: str | None, taken: Collection[str | None], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Choose a machine for a server: its former one, the one with its name, or the first free one.

    If any machine carries a server name, the head's machine is used only by name. Otherwise a server whose machine is
    late or lost would start there, away from its users, and stay.

    Args:
        name: name of the server; a rank of a server with several GPUs is `SERVER/GPU` and runs on its server's machine.
        before: Ray node id of its former machine, or None.
        taken: machines of other servers.

    Raises:
        CapacityError: no machine is free.
    """
    there = {str(node["NodeID"]): node for node in nodes if node["Alive"]}
    if before in there:
        return str(before)
    named = {
        resource.removeprefix(_NAME): number
        for number, node in there.items()
        for resource in node["Resources"]
        if resource.startswith(_NAME)
    }
    for asked in (name, name.rpartition("/")[0]):
        if asked in named:
            return named[asked]
    free = sorted(
        (node["NodeManagerAddress"], number)
        for number, node in there.items()
        if number not in taken and number not in named.values() and not (named and _HEAD in node["Resources"])
    )
    if not free:
        raise CapacityError(
            f"{numbered(len(there), 'machine')} joined, none for server {name}; join one with: ray start "
            f"--address=HEAD --resources '{{\"{_NAME}{name}\": 1}}'"
        )
    return str(free[0][1])


def head_of(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return the address of the head's machine as the joined machines know it.

    A head may have been started as 127.0.0.1, which every other machine takes for itself.

    Raises:
        UsageError: the head has no other address, and other machines have joined.
    """
    there = [node for node in nodes if node["Alive"]]
    addresses = {str(node["NodeManagerAddress"]) for node in there}
    head = next((str(node["NodeManagerAddress"]) for node in there if _HEAD in node["Resources"]), min(addresses))
    if _is_loopback(head) and (others := sorted(one for one in addresses if not _is_loopback(one))):
        raise UsageError(
            f"the Ray head's address is {head}, which {others[0]} cannot reach; start it "
            f"again with: ray start --head --node-ip-address=ADDRESS, one that the others reach"
        )
    return head


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
