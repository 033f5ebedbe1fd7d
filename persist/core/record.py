"""Records: what is written as bytes. The only module of the core that knows msgspec.

A record is written as an array of its fields in their order, and bytes are decoded straight into it. A field may be
added at the end, with a default; none is ever removed or reordered. A record with more fields than this build knows is
refused. Records are never changed, and none leads back to itself: so the garbage collector need not look at them.
Making one in Python checks nothing; decoding one checks every field.
"""

from __future__ import annotations

from msgspec import Meta, Struct
from msgspec.structs import asdict, force_setattr, replace


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The base of every record."""


__all__ = ["Meta", "Record", "asdict", "force_setattr", "replace"]
