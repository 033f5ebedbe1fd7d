"""Following a listen stream: frames as events, resumed at another server when one goes away."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

from persist.client.listen import ListenEvent
from persist.core.antichain import Antichain
from persist.core.errors import Unavailable
from persist.http_client.answers import Broken
from persist.http_client.calls import HttpCalls, error_of
from persist.http_client.connections import NotSent
from rpc.listen_frames import FRAMES, HEARTBEAT_S, Frame, frames

SILENCE_S = 3 * HEARTBEAT_S  # after so long without even a heartbeat the server counts as gone


def follow(
    calls: HttpCalls, name: str, after: int | None = None, until: Antichain | None = None
) -> Iterator[ListenEvent]:
    """Every update after a time, once and in order, until `until` or the shard's end; heartbeats are left out.

    Goes on from where it was when a server ends, for as long as one is found within the connection's timeout. The id of
    the last frame tells the server what was read, and of which shard.
    A step of several events that was cut begins anew: `lower == upper` still says "more to come", so count on a step
    only when its frontier has moved. Raises UnknownShard (the name belongs to another shard now), HistoryLost (what it
    has read is not in the log any more).
    """
    frontier = Antichain(0 if after is None else after + 1)
    end = until or Antichain(None)
    deadline: float | None = None
    place: str | None = None  # the id at `frontier`
    while frontier.element is not None and frontier < end:
        for server in calls.servers.order(name):
            try:
                for frame in _frames(calls, server, name, (frontier, end), place):
                    deadline = None
                    if frame.event is not None:
                        yield frame.event
                        frontier = frame.event.upper
                    place = frame.id
                break
            except (NotSent, Broken, Unavailable):
                calls.servers.failed(server)
        if frontier.element is not None and frontier < end:
            deadline = calls.still(deadline, name)


def _frames(
    calls: HttpCalls, server: str, name: str, interval: tuple[Antichain, Antichain], place: str | None
) -> Iterator[Frame]:
    frontier, until = interval
    assert frontier.element is not None
    query = f"until={'[]' if until.element is None else until.element}"
    if frontier.element > 0:
        query += f"&after={frontier.element - 1}"
    path = f"/v1/shards/{quote(name, safe='')}/listen?{query}"
    headers = {"accept": FRAMES} if place is None else {"accept": FRAMES, "last-event-id": place}
    with calls.stream(server, path, headers, SILENCE_S) as (reply, pieces):
        calls.servers.worked(server)
        if reply.status >= 400:
            raise error_of(server, reply, safe=True)
        yield from frames(pieces)
