"""Fair queue: clients in turn, and each client's requests in order."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item")


class FairQueue(Generic[_Item]):
    """A queue of clients, requests and items: each `pop` takes from one client, and there from its next request.

    A request's items keep their order. Operations take constant time, except `pop`, which is linear in the clients, and
    `remove`, which is linear in one request.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, OrderedDict[Hashable, deque[_Item]]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, client: Hashable, request: Hashable, item: _Item) -> None:
        """Append an item to its request."""
        self._clients.setdefault(client, OrderedDict()).setdefault(request, deque()).append(item)
        self._length += 1

    def pop(
        self,
        load: Callable[[Any], Any] = lambda client: 0,
        choose: Callable[[Iterable[Any]], Any] = lambda requests: next(iter(requests)),
    ) -> _Item:
        """Remove and return an item of the client with the least load; among equals, of the one whose turn it is.

        Args:
            choose: chooses one of the client's requests, given the next one first.

        Raises:
            IndexError: there is none.
        """
        if not self._clients:
            raise IndexError("nothing waits")
        client = min(self._clients, key=load)
        requests = self._clients[client]
        request = choose(requests)
        items = requests[request]
        item = items.popleft()
        self._length -= 1
        requests.move_to_end(request)
        self._clients.move_to_end(client)
        self._tidy(client, request)
        return item

    def remove(self, client: Hashable, request: Hashable) -> list[_Item]:
        """Remove all remaining items of a request."""
        items: list[_Item] = []
        if client in self._clients and request in self._clients[client]:
            items += self._clients[client][request]
            self._clients[client][request].clear()
            self._length -= len(items)
            self._tidy(client, request)
        return items

    def _tidy(self, client: Hashable, request: Hashable) -> None:
        if not self._clients[client][request]:
            del self._clients[client][request]
        if not self._clients[client]:
            del self._clients[client]
