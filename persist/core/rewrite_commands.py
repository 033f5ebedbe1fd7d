"""Commands that rewrite what a shard holds, by an earlier time. `commands` has all of their names too."""

from __future__ import annotations

from typing import Annotated, ClassVar

from persist.core.antichain import Antichain
from persist.core.attribute import AttributeUpdate
from persist.core.batch import Run
from persist.core.command import MAINTAIN, MANAGE, WRITE, WriteCommand
from persist.core.ids import Token, WriterId, written
from persist.core.outcomes import DIGEST_BYTES
from persist.core.record import Meta
from persist.core.state import SchemaRecord


class Rewrite(WriteCommand, frozen=True):
    """Append rows at the next time iff the shard's upper is `expected_upper`. -> Appended

    The writer has worked them out from the contents as of `as_of`. UpperMismatch carries the actual upper.
    """

    writer: Annotated[WriterId, written(WriterId)]
    token: Annotated[Token, written(Token)]
    expected_upper: Antichain
    as_of: int
    runs: tuple[Run, ...]
    digest: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""


class Restore(Rewrite, frozen=True):
    """The rows lead back to the contents as of `as_of`. -> Appended

    With attributes alone, and no `runs`, no time is taken, and the interval is empty.
    """

    attributes: tuple[AttributeUpdate, ...] = ()


class Truncate(Rewrite, frozen=True):
    """The rows take away what is there since `as_of`, the last time before the cut. -> Appended

    It lands also where rows were added since the upper was `expected_upper`, but none was taken away. InvalidUsage
    where the shard is fed by `append`.
    """

    scopes: ClassVar[tuple[str, ...]] = (WRITE, MAINTAIN)


class DropBefore(Rewrite, frozen=True):
    """Take away the rows with times up to `as_of`, the last time before the cut, without any `runs`. -> Appended

    An `expected_upper` of [] stands for whatever the upper is; then it takes no time of a shard that is fed by
    `append`, and becomes effective with the next commit of its writer. An empty interval: that, or no such row is
    there. InvalidUsage where what was written from the cut on may hold a retraction; NotReadable where the time before
    the cut was forgotten.
    """

    scopes: ClassVar[tuple[str, ...]] = (WRITE, MAINTAIN)


EDITS = (
    "insert",  # into a shard with unique keys
    "upsert",
    "merge_into",
    "delete",
    "update",
    "replace_where",
    "overwrite",
)  # verbs, as the commit history has them


class Editing(Rewrite, frozen=True, kw_only=True):
    """The rows are what a verb, such as `upsert`, changes in the contents as of `as_of` (-1: nothing is there yet).

    -> Appended. With `drops` all that is there goes as well, as by `DropBefore`, and an `expected_upper` of [] stands
    for whatever the upper is. `question` tells what was asked for: a token stands for that, whatever rows it came to.
    Where nothing changes no time is taken, and the interval is empty. Raises InvalidUsage and NotReadable as
    `DropBefore` does.
    """

    verb: Annotated[str, Meta(pattern=f"^({'|'.join(EDITS)})$")]
    question: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""
    attributes: tuple[AttributeUpdate, ...] = ()
    drops: bool = False


class Edit(Editing, frozen=True, kw_only=True):
    """See `Editing`; `cut` as for CompareAndAppend. -> Appended"""

    cut: int = 0


class Reshape(Editing, frozen=True, kw_only=True):
    """An edit, and in the same commit `schema` becomes current, iff the current id is `expected_id`. -> Appended

    The rows are of the schema after that, or of one before it. What is refused changes neither rows nor columns:
    SchemaMismatch, and InvalidUsage where the shard cannot evolve so.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE,)  # as EvolveSchema
    expected_id: int
    schema: SchemaRecord
