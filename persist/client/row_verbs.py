"""The verbs of `Shard` that read before they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from persist.attributes.attribute_handle import AttributeUpdates
from persist.client.arguments import checked, checked_sets
from persist.client.commit_info import Info, info_bytes
from persist.client.contents_diff import Named
from persist.client.dml_plans import KEYS_MAX, Delete, Overwrite, Plan, ReplaceWhere, Update, Upsert, VerbBinding
from persist.client.history_api import HandleSettings
from persist.client.merge import Merge
from persist.client.optimistic_edit import Edited, Editing
from persist.client.transport import OneShard
from persist.client.write import Updates, reusable
from persist.core.attribute import as_updates as as_attribute_updates
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.ids import Token, parse

NOTHING_READ = -1  # the time that was read where nothing was there


class Verbs:
    """Changes of rows that are there. Each is one commit, as if it had run alone at its time, or it changes nothing.

    Where others write meanwhile it goes on: anew if they changed what it had read, up to 100 times. With `read_time` it
    lands only if nobody wrote since.
    """

    name: str
    _schema_id: int
    _transport: OneShard
    _settings: HandleSettings

    def upsert(
        self,
        rows: Updates,
        *,
        delete_column: str | None = None,
        read_time: int | None = None,
        token: Token | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Put rows by their keys: afterwards each key has the row that was given, and no other.

        Only parts and row groups that may have one of the keys are read. A row that is there already is not written.

        Args:
            rows: as `insert` says, one a key, held in memory. Where they lack columns, all of them the same ones, a
                key that is there keeps its values in these (it must have one row), and a new key has null.
            delete_column: a column of the rows, which the shard has not, of booleans: where it is true the key only
                goes.
            read_time: the time that was read, such as `snapshot.as_of`: it lands only if nobody wrote after it. -1:
                nothing was there.
            token: as `insert` says; it stands for this verb with these arguments.
            attributes: as `insert` says.
            info: as `insert` says.
        Returns: what it came to: see `Edited`. Where nothing changes nothing is committed.
        Raises: InvalidUsage (the rows do not fit, or a key comes twice), UpperMismatch (somebody wrote after
            `read_time`; or all the time; or the shard is closed), AttributeMismatch, TokenReused, OutcomeForgotten,
            NotReadable (nothing can be read), Unavailable or Overloaded (it did not happen), Indeterminate (it may
            have happened: repeat it with the token). Nothing was changed, but for Indeterminate.
        """
        checked("delete_column", delete_column, str, type(None))
        plan = Upsert(reusable(rows), delete_column)
        return self._edit(plan, read_time, token, attributes, info)

    def delete(
        self,
        where: str | None = None,
        *,
        keys: Sequence[Any] | None = None,
        read_time: int | None = None,
        token: Token | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Take rows away: those for which a predicate is true, or those that have one of some keys.

        History keeps them, so `restore` brings them back; `erase` takes rows away for good.

        Args:
            where: a predicate, as the Spark option `where` says.
            keys: up to a million keys: tuples in key order, or the values themselves where there is one key column.
            read_time: as `upsert` says.
            token: as `upsert` says.
            attributes: as `insert` says.
            info: as `insert` says.
        Returns: as `upsert`.
        Raises: InvalidUsage (neither or both are given, no such column or key), and what `upsert` raises.
        """
        if (where is None) == (keys is None):
            raise InvalidUsage("give where or keys, and not both; `truncate` and `overwrite` take everything away")
        checked("where", where, str, type(None))
        if keys is not None and (isinstance(keys, (str, bytes, Mapping)) or not isinstance(keys, Sequence) or not keys):
            raise InvalidUsage("keys must be a list of keys, of at least one")
        if keys is not None and len(keys) > KEYS_MAX:
            raise InvalidUsage(f"there are {len(keys)} keys; at most {KEYS_MAX} go at once: use where, or upsert")
        return self._edit(Delete(where, keys), read_time, token, attributes, info)

    def update(
        self,
        set: Mapping[str, Any],  # noqa: A002 - as SQL has it
        where: str | None = None,
        *,
        read_time: int | None = None,
        token: Token | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Give rows new values in some columns.

        Args:
            set: a value for each of these columns, or a `pyarrow.compute.Expression` over the columns of the row, such
                as `{"n": pc.field("n") + 1}`. Columns that are not named keep their values.
            where: which rows, by a predicate, as the Spark option `where` says; None is all.
            read_time: as `upsert` says.
            token: as `upsert` says.
            attributes: as `insert` says.
            info: as `insert` says.
        Returns: as `upsert`.
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
        token: Token | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Put rows in the place of those for which a predicate is true: a day that is loaded again, say.

        Args:
            where: the predicate, as the Spark option `where` says. It must be true for all of the new rows.
            rows: as `insert` says, held in memory.
            read_time: as `upsert` says.
            token: as `upsert` says.
            attributes: as `insert` says.
            info: as `insert` says.
        Returns: as `upsert`.
        Raises: InvalidUsage (the predicate is not true for a row), and what `upsert` raises.
        """
        checked("where", where, str)
        plan = ReplaceWhere(where, reusable(rows))
        return self._edit(plan, read_time, token, attributes, info)

    def overwrite(
        self,
        rows: Updates,
        *,
        read_time: int | None = None,
        token: Token | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Replace all rows.

        What was there goes by metadata alone, without being read; then `removed` is None. It is read where readable
        history has 984 drops already.

        Args:
            rows: as `insert` says, held in memory.
            read_time: as `upsert` says. Without it what others write meanwhile goes too.
            token: as `upsert` says.
            attributes: as `insert` says.
            info: as `insert` says.
        Returns: as `upsert`.
        Raises: what `upsert` raises.
        """
        return self._edit(Overwrite(reusable(rows)), read_time, token, attributes, info)

    def merge(self, source: Updates, on: Sequence[str] | None = None) -> Merge:
        """A merge of a source into the shard, which `execute` runs, once it was said what is to happen to which rows.

        Args:
            source: rows as `insert` says, held in memory, with any columns.
            on: the columns by which rows match, which both have; None is the shard's key.
        Returns: what takes the clauses: see `Merge`.
        Raises: InvalidUsage (what is given is none); `execute` where there is no such column.
        """
        return Merge.of(partial(self._edit, known=self._schema_id), reusable(source), on)

    def _edit(
        self,
        plan: Plan,
        read_time: int | None,
        token: Token | None,
        attributes: AttributeUpdates,
        info: Info | None,
        known: int | None = None,
    ) -> Edited:
        """`known`: the id of the schema by whose names the plan was given; None: the one that the handle knows."""
        if token is not None:
            parse(Token, token)
        said, changes, settings = info_bytes("info", info), as_attribute_updates(attributes), self._settings
        editing = Editing.of(
            self._transport,
            self.name,
            Named(None),
            settings.write,
            settings.read,
            info=said,
            plan=VerbBinding(plan, self._schema_id if known is None else known),
            expected=expected_of(read_time),
            attributes=changes,
        )
        return editing.run(token)


def expected_of(read_time: int | None) -> Antichain | None:
    """The upper that the shard must have; None: whatever it has. Raises InvalidUsage."""
    if read_time is None:
        return None
    if type(read_time) is not int or not NOTHING_READ <= read_time <= TIME_MAX:
        raise InvalidUsage(
            f"read_time is {read_time!r:.100}; it must be a time in [0, {TIME_MAX}], or {NOTHING_READ} where nothing "
            "was there"
        )
    return Antichain(read_time + 1)
