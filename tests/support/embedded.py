"""Clients embedded in a test."""

from __future__ import annotations

from compactor.on_demand import maintain
from persist import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location


def client_of(location: Location) -> Client:
    """A client of the location in this process, which can merge and collect by hand."""
    return Client(EmbeddedTransport(location, maintain))
