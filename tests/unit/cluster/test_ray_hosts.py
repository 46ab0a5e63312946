"""Which of the machines that have joined Ray gets a server, and what the head's is called."""

from typing import Any

import pytest

from moetool.base.errors import CapacityError, UsageError
from moetool.cluster.ray_hosts import choose, head_of
from moetool.cluster.transport import own_address, url_for_others
from tests.refusals import refused


def node(address: str, *resources: str, alive: bool = True) -> dict[str, Any]:
    """A machine as Ray describes it; its number is its address's last part."""
    return {
        "NodeID": address.rpartition(".")[2],
        "NodeManagerAddress": address,
        "Alive": alive,
        "Resources": {f"node:{address}": 1.0, **dict.fromkeys(resources, 1.0)},
    }


HEAD = node("10.0.0.9", "node:__internal_head__")


def test_machines_without_names_are_taken_in_the_order_of_their_addresses() -> None:
    nodes = [HEAD, node("10.0.0.2"), node("10.0.0.1")]
    taken: list[str | None] = []
    for name in ("a", "b", "c"):
        taken.append(choose(name, None, taken, nodes))
    assert taken == ["1", "2", "9"]
    with refused(CapacityError, "3", "server d"):
        choose("d", None, taken, nodes)


def test_a_server_goes_to_the_machine_with_its_name_and_stays_where_it_was() -> None:
    nodes = [HEAD, node("10.0.0.1", "moetool:b"), node("10.0.0.2")]
    assert choose("b", None, [], nodes) == "1"
    assert choose("a", None, [], nodes) == "2"
    assert choose("b", "2", [], nodes) == "2"
    assert choose("b/1", None, ["1"], nodes) == "1"  # the second rank of the same server


def test_a_server_whose_machine_is_late_or_gone_does_not_begin_on_the_heads() -> None:
    named = [HEAD, node("10.0.0.1", "moetool:a"), node("10.0.0.2", "moetool:b", alive=False)]
    with refused(CapacityError, '{"moetool:b": 1}'):
        choose("b", "2", ["1"], named)
    assert choose("b", "2", ["1"], [*named, node("10.0.0.3")]) == "3"  # one that has joined to help out
    assert choose("c", None, [], [node("10.0.0.9", "node:__internal_head__", "moetool:c"), named[1]]) == "9"


def test_the_head_is_called_as_the_others_know_it() -> None:
    assert head_of([node("10.0.0.1"), HEAD]) == "10.0.0.9"
    here = node("127.0.0.1", "node:__internal_head__")
    assert head_of([here]) == "127.0.0.1"
    assert head_of([here, node("10.0.0.1", alive=False)]) == "127.0.0.1"
    with refused(UsageError, "127.0.0.1", "10.0.0.1", "--node-ip-address"):
        head_of([here, node("10.0.0.1")])


@pytest.mark.parametrize("toward", ["127.0.0.1", "127.0.0.1:6379", "localhost:1"])
def test_own_address_with_a_port_and_without(toward: str) -> None:
    assert own_address(toward) in ("127.0.0.1", "::1")


@pytest.mark.parametrize("toward", ["::1", "[::1]", "[::1]:6379"])
def test_own_address_of_the_newer_family(toward: str) -> None:
    try:
        assert own_address(toward) == "::1"
    except Exception as error:
        pytest.skip(f"this machine has no IPv6 ({error})")
    assert url_for_others("http://[::1]:80", "::", toward) == "http://[::1]:80"


def test_a_server_on_every_address_is_told_of_by_one_that_others_reach() -> None:
    assert url_for_others("https://localhost:80", "0.0.0.0", "127.0.0.1:6379") == "https://127.0.0.1:80"
    assert url_for_others("http://127.0.0.1:80", "127.0.0.1", "10.0.0.1") == "http://127.0.0.1:80"
    assert url_for_others("http://127.0.0.1:80", "0.0.0.0", "") == "http://127.0.0.1:80"
