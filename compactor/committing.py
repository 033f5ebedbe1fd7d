"""How maintenance commits: by its own machines, or through the server that commits for the writers.

A process beside a busy writer loses most races against it, and every race that it wins makes the writer repeat its
commit. Through the server its commands join the writers' group commit, and nobody repeats anything. States are read
straight from the stores, and so are blobs, either way. While the server is away, maintenance commits by itself.
"""

from __future__ import annotations

from persist.client.retry import send
from persist.client.transport import Transport
from persist.commit.location import Location
from persist.commit.place import CommitterOf
from persist.core import commands as c
from persist.core.errors import Indeterminate, Unavailable
from persist.core.state import State

RETRY_S = 2.0  # how long a server that does not answer is waited for


def through_server(location: Location, transport: Transport) -> CommitterOf:
    """Committers of the shards of a location that send their commands to a server of that location."""
    return lambda name: _ThroughServer(name, location, transport)


class _ThroughServer:
    def __init__(self, name: str, location: Location, transport: Transport) -> None:
        self._name = name
        self._machine = location.machine(name)
        self._transport = transport

    @property
    def name(self) -> str:
        return self._name

    def state(self) -> State:
        return self._machine.state()

    def refresh(self) -> State:
        return self._machine.refresh()

    def apply(self, command: c.Command) -> c.Result:
        try:
            result = send(self._transport, self._name, command, RETRY_S)
        except (Unavailable, Indeterminate):
            return self._machine.apply(command)  # a server that is away commits nothing with which this could race
        self._machine.refresh()
        return result
