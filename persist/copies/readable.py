"""What looking at a location takes: both stores, how versions are read, a clock. A location that is open has it, and so
has one that was opened to be looked at, to which nothing can be written."""

from __future__ import annotations

from typing import Protocol

from blob import Blob
from consensus import Consensus
from persist.commit.state_loader import Versions
from persist.commit.system import Clock
from persist.formats.state_frames import Build


class Readable(Protocol):
    """Both stores of a location, to be read."""

    @property
    def blob(self) -> Blob: ...

    @property
    def consensus(self) -> Consensus: ...

    @property
    def versions(self) -> Versions: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def build(self) -> Build: ...
