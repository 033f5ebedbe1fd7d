"""Commands by which a shard goes on at another home. `commands` has all of their names."""

from __future__ import annotations

from typing import Annotated

from persist.core.command import Command
from persist.core.record import Meta


class HandOver(Command, frozen=True):
    """The last commit of the shard here: it goes on at a home of the location that has this epoch. -> Done

    From then on every change is refused as ReadOnly, but for `TakeBack`. Conflict: it was handed over to another one.
    """

    epoch: Annotated[int, Meta(ge=1)]


class TakeBack(Command, frozen=True):
    """The shard goes on here: nothing came of the home of this epoch. -> Done, also where it was not handed over.

    Conflict: it was handed over to another one.
    """

    epoch: Annotated[int, Meta(ge=1)]
