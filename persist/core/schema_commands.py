"""Commands that change what a shard's rows are. `commands` has all of their names too."""

from __future__ import annotations

from persist.core.antichain import Antichain
from persist.core.command import ManagedCommand, ReadCommand
from persist.core.state import SchemaRecord


class EvolveSchema(ManagedCommand, frozen=True):
    """Make `schema` current iff the current id is `expected_id` and the shard can evolve to it. -> SchemaRegistered

    InvalidUsage where it is no schema, or does not fit the one before it. Where types have no room for every value,
    `expected_upper` is the shard's upper up to which all values were found to have room; UpperMismatch where somebody
    wrote since.
    """

    expected_id: int
    schema: SchemaRecord
    expected_upper: Antichain | None = None


class Constrain(ManagedCommand, frozen=True):
    """Make `schema`, which differs in its constraints alone, current iff the current id is `expected_id`.

    -> SchemaRegistered. Where it constrains rows more than before, `expected_upper` is the shard's upper whose contents
    were found to obey it; UpperMismatch where somebody wrote since. None: it constrains them less. InvalidUsage where
    it is no schema, differs in something else, or constrains more without an upper.
    """

    expected_id: int
    schema: SchemaRecord
    expected_upper: Antichain | None = None


class ReadSchemaTimes(ReadCommand, frozen=True):
    """From which times on the shard had its schemas. -> SchemaTimes; changes nothing."""
