"""What binds two stores into one location: the same record lies in both."""

from __future__ import annotations

from persist.core.record import Record


class Binding(Record, frozen=True):
    """The id of a location, its epoch (1 at first), and which pair of stores was bound: `pair` is fresh at each epoch.

    Two consensus stores that were bound to one blob store at the same time differ in `pair` alone.
    """

    location_id: str
    epoch: int
    pair: str
