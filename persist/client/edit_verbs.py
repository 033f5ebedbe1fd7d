"""The methods of `Shard` that edit rows: they read before they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from persist.attributes.attribute_handle import AttributeUpdates
from persist.client.arguments import check_int, checked, checked_sets, names
from persist.client.commit_info import Info, info_bytes
from persist.client.dml_plans import KEYS_MAX, Delete, Overwrite, Plan, ReplaceWhere, Update, Upsert, VerbBinding
from persist.client.merge import Merge
from persist.client.optimistic_edit import Edited, EditOperation
from persist.client.shard_base import ShardBase
from persist.client.write import Updates, to_rereadable
from persist.core.attribute import as_updates as as_attribute_updates
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.ids import given_token

NOTHING_READ = -1  # the read time of an empty shard


class EditMethods(ShardBase):
    """Edits of existing rows. Each is one commit, as if it had run alone at its time, or changes nothing.

    If others write meanwhile, it continues; if they changed what it read, it is computed anew, up to 100 times. With
    `read_time` it lands only if nothing was written since.
    """

    def upsert(
        self,
        rows: Updates,
        *,
        delete_column: str | None = None,
        read_time: int | None = None,
        token: str | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Put rows by their keys: afterwards each key has the given row and no other.

        Only parts and row groups that may have one of the keys are read. A row that already exists is not written.

        Args:
            rows: as `insert` says, one per key, held in memory. If all of them lack the same columns, an existing key
                keeps its values in these (it must have one row), and a new key has their defaults, or null.
            delete_column: a boolean column of the rows, which the shard does not have: if it is true, the key is only
                deleted.
            read_time: the time that was read, such as `snapshot.as_of`: it lands only if nothing was written after it.
                -1: the shard was empty.
            token: as `insert` says; it stands for this verb with these arguments.
            attributes, info: as `insert` says.
        Returns: the result: see `Edited`. If nothing changes, nothing is committed.
        Raises: InvalidUsage (the rows do not fit, or a key occurs twice), UpperMismatch (others wrote after
            `read_time`, or all the time, or the shard is closed), AttributeMismatch, TokenReused, OutcomeForgotten,
            NotReadable (nothing can be read), Unavailable or Overloaded (it did not happen), Indeterminate (it may
            have happened: repeat it with the token). Nothing was changed, except perhaps after Indeterminate.
        """
        checked("delete_column", delete_column, str, type(None))
        return self._edit(Upsert(to_rereadable(rows), delete_column), read_time, token, attributes, info)

    def delete(
        self,
        where: str | None = None,
        *,
        keys: Sequence[Any] | None = None,
        read_time: int | None = None,
        token: str | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Delete the rows for which a predicate is true, or that have one of some keys.

        History keeps them, so `restore` brings them back; `erase` removes rows for good.

        Args:
            where: a predicate, as the Spark option `where` says.
            keys: up to a million keys: tuples in key order, or the values themselves where there is one key column.
            read_time, token, attributes, info: as `upsert` says, and so is the result.
        Raises: InvalidUsage (not exactly one of them, no such column or key), and what `upsert` raises.
        """
        if (where is None) == (keys is None):
            raise InvalidUsage("give either where or keys; `truncate` and `overwrite` remove everything")
        checked("where", where, str, type(None))
        if keys is not None and (isinstance(keys, (str, bytes, Mapping)) or not isinstance(keys, Sequence) or not keys):
            raise InvalidUsage("keys must be a non-empty list of keys")
        if keys is not None and len(keys) > KEYS_MAX:
            raise InvalidUsage(f"there are {len(keys)} keys; one call takes at most {KEYS_MAX}: use where, or upsert")
        return self._edit(Delete(where, keys), read_time, token, attributes, info)

    def update(
        self,
        set: Mapping[str, Any],  # noqa: A002 - as SQL has it
        where: str | None = None,
        *,
        read_time: int | None = None,
        token: str | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Set new values in some columns.

        Args:
            set: a value for each of these columns, or a `pyarrow.compute.Expression` over the columns of the row, such
                as `{"n": pc.field("n") + 1}`. Other columns keep their values.
            where: which rows, by a predicate, as the Spark option `where` says; None is all.
            read_time, token, attributes, info: as `upsert` says, and so is the result.
        Raises: InvalidUsage (no such column, or a value does not fit), and what `upsert` raises.
        """
        sets = checked_sets("set", set)
        checked("where", where, str, type(None))
        return self._edit(Update(where, sets), read_time, token, attributes, info)

    def replace_where(
        self,
        where: str,
        rows: Updates,
        *,
        read_time: int | None = None,
        token: str | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Replace the rows for which a predicate is true, such as a day that is loaded again.

        Args:
            where: the predicate, as the Spark option `where` says. It must be true for all new rows.
            rows: as `insert` says, held in memory.
            read_time, token, attributes, info: as `upsert` says, and so is the result.
        Raises: InvalidUsage (the predicate is not true for a row), and what `upsert` raises.
        """
        checked("where", where, str)
        return self._edit(ReplaceWhere(where, to_rereadable(rows)), read_time, token, attributes, info)

    def overwrite(
        self,
        rows: Updates,
        *,
        read_time: int | None = None,
        token: str | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Replace the whole contents.

        The old rows are removed by metadata alone, without being read; then `removed` is None, and it takes a time even
        if the new rows are the same. They are read if readable history already has 984 drops.

        Args:
            rows: as `insert` says, held in memory.
            read_time: as `upsert` says. Without it, rows that others write meanwhile are replaced, too.
            token, attributes, info: as `upsert` says, and so is the result.
        Raises: what `upsert` raises.
        """
        return self._edit(Overwrite(to_rereadable(rows)), read_time, token, attributes, info)

    def merge(self, source: Updates, on: Sequence[str] | None = None) -> Merge:
        """A merge of a source into the shard. Add clauses to it, then `execute` it.

        Args:
            source: rows as `insert` says, held in memory, with any columns.
            on: the columns by which rows match, which both have; None is the shard's key.
        Returns: the merge under construction: see `Merge`.
        Raises: InvalidUsage (an argument is invalid); `execute` if there is no such column.
        """
        run = partial(self._edit, known=self._schema_id)
        return Merge(run, to_rereadable(source), None if on is None else names("on", on))

    def _edit(
        self,
        plan: Plan,
        read_time: int | None,
        token: str | None,
        attributes: AttributeUpdates,
        info: Info | None,
        known: int | None = None,
    ) -> Edited:
        """`known`: the id of the schema that names the columns of the plan; None: the one that the handle knows."""
        own = given_token(token)
        if read_time is not None:
            check_int("read_time", read_time, NOTHING_READ, TIME_MAX, f"; {NOTHING_READ} says that the shard was empty")
        return EditOperation.of(
            self._transport,
            self.name,
            self._settings,
            info=info_bytes("info", info),
            plan=VerbBinding(plan, self._schema_id if known is None else known),
            expected=None if read_time is None else Antichain(read_time + 1),
            attributes=as_attribute_updates(attributes),
        ).run(own)
