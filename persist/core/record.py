"""Records: the base of everything that is encoded as bytes. The only module of the core that knows msgspec.

A record is encoded as an array of its fields in their order. A field may be added at the end, with a default; none is
removed or reordered. Decoding a record with more fields than this build knows fails. Records are immutable and without
reference cycles, so the garbage collector does not track them. Constructing one in Python checks nothing; decoding one
checks every field.
"""

from __future__ import annotations

from msgspec import Meta, Struct
from msgspec.structs import asdict, force_setattr, replace


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The base of every record."""


__all__ = ["Meta", "Record", "asdict", "force_setattr", "replace"]
