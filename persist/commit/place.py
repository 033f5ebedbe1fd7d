"""What maintenance needs of a location and of its shards, whoever opened it and whoever commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from blob import Blob
from consensus import Consensus
from persist.commit.location_identity import Identity
from persist.commit.machine import Machine
from persist.commit.state_loader import Versions
from persist.commit.system import Clock
from persist.core import commands as c
from persist.core.ids import IdSource
from persist.core.state import State


class Committer(Protocol):
    """What maintenance needs of a shard; `persist.commit.machine.Machine` is one. Its commands may be repeated."""

    @property
    def name(self) -> str: ...

    def state(self) -> State:
        """The State as last seen; every commit that was made here is in it."""
        ...

    def refresh(self) -> State:
        """The State as of now."""
        ...

    def apply(self, command: c.Command) -> c.Result:
        """Commit one command. Unavailable: it did not happen. Indeterminate: it may have."""
        ...


CommitterOf = Callable[[str], Committer]


class Place(Protocol):
    """Where shards live; `persist.commit.location.Location` is one."""

    blob: Blob
    consensus: Consensus
    versions: Versions
    clock: Clock
    ids: IdSource
    identity: Identity

    def machine(self, name: str) -> Machine: ...
