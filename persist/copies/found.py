"""Faults of shards that the checker finds, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a fault is of. docs/check.md has the table of what each kind finds, and at which depth."""

    LOG = "log"  # an entry cannot be read, is not there, or follows another one than it says
    ROLLUP = "rollup"  # it cannot be read, or holds another State than the log makes
    STEP = "step"  # a commit moved what never moves back, or named a blob that had left
    STATE = "state"  # the State contradicts itself
    LOAN = "loan"  # a blob of another shard, which that one has not lent
    MISSING = "missing"  # a blob is not there
    SIZE = "size"  # a blob has another size
    BUNDLE = "bundle"  # it cannot be read, or lists something else
    PART = "part"  # the bytes or rows of a part are others than the State says
    ORDER = "order"  # the rows of a part are not in order, or lie outside the bounds of their keys
    INDEX = "index"  # the tree of attributes contradicts itself
    BLOB = "blob"  # any other blob cannot be read


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a shard. `key` is that of the blob ("": it is of no blob)."""

    shard: str
    kind: Kind
    what: str
    key: str = ""

    def to_json(self) -> dict[str, str | None]:
        """The fields by name; null for none."""
        return {"shard": self.shard, "kind": str(self.kind), "what": self.what, "key": self.key or None}

    def __str__(self) -> str:
        """One sentence that names the shard, the kind and the blob."""
        of = f", blob {self.key}" if self.key else ""
        return f"shard {self.shard!r} has a fault of the kind {self.kind}{of}: {self.what}"
