"""The command that writes rows which follow from the contents of a shard, and what its parts come to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from persist.core.attribute import AttributeUpdate
from persist.core.batch import Run
from persist.core.command import ADMIN, MAINTAIN, MANAGE, TIME_MS_MAX, WRITE, Command, WriterCommand
from persist.core.erasure import DEADLINE_MS_MAX, QUESTION_BYTES
from persist.core.frontier import Antichain
from persist.core.record import Meta, Record
from persist.core.state import SchemaRecord

INSERT = "insert"  # into a shard with unique keys
EDITS = (INSERT, "upsert", "merge_into", "delete", "update", "replace_where", "overwrite")
"""Verbs, as the commit history has them."""
RESTORE, TRUNCATE, DROP_BEFORE, ERASE = "restore", "truncate", "drop_before", "erase"
NEVER = -2  # an `as_of` that precedes no upper: it asks what became of a token, and changes nothing


class SchemaChange(Record, frozen=True):
    """`schema` becomes current, iff the current id is `expected_id`. What is refused changes neither rows nor columns.

    Raises SchemaMismatch, and InvalidUsage where the shard cannot evolve so.
    """

    expected_id: int
    schema: SchemaRecord


class NewErasure(Record, frozen=True):
    """The State remembers the erasure under its id, and the shard itself lets history before it go.

    So it does with its commit history, and with `tags` with all earlier tags. `pending` erasures were there when the
    rows were computed; UpperMismatch where there are others now. `force`: at once, where a shard is fed by `append`.
    """

    erasure: Annotated[str, Meta(pattern="^e[0-9a-f]{32}$")]
    deadline_ms: Annotated[int, Meta(ge=1, le=DEADLINE_MS_MAX)] | None = None
    reason: str = ""
    tags: bool = False
    pending: Annotated[int, Meta(ge=0)] = 0
    force: bool = False


class PassedCut(Record, frozen=True):
    """The policy of rows is done with its cut of the instant `cut_ms`: that one and earlier ones go.

    `overran`: it has passed a consumer.
    """

    cut_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
    overran: bool = False


class Rewrite(WriterCommand, frozen=True):
    """Write rows that were computed from the contents as of `as_of`, the time before `expected_upper`. -> Appended

    They land at the next time, iff the shard's upper is `expected_upper`. `[]` with a tombstone: whatever it is. The
    other fields are parts that are present or absent; `operation` is what the commit history calls them, and
    InvalidUsage where it does not match. An empty interval: nothing changed, or it waits for the next time of a shard
    that is fed by `append`. UpperMismatch carries the actual upper. A token stands for the operation, its target and
    the `question`, whatever rows that comes to.

    - `schema`: see SchemaChange. The rows are of the schema after that, or of one before it.
    - `cut`: as for CompareAndAppend; 0: unique keys were looked up, and no truncation is pending.
    - `settings_version`: the settings have it, and a policy by a column; else Conflict.
    - `undoes`: the rows lead back to the contents as of this time, and truncations after it are undone.
    - `truncates`: the rows take away what is there since before this time. It lands also where rows were only added
      since `expected_upper`; where the shard is truncated that far already, nothing changes.
    - `tombstone`: rows before this time go without a row that says so; `[]`: all. InvalidUsage where what was written
      from then on may hold a retraction; NotReadable where the time before it was forgotten.
    - `erasure`: see NewErasure.
    - `passes`: see PassedCut. The cut is what the rows go before.
    """

    expected_upper: Antichain
    as_of: int
    operation: Annotated[str, Meta(pattern=f"^({'|'.join((RESTORE, TRUNCATE, DROP_BEFORE, ERASE, *EDITS))})$")]
    runs: tuple[Run, ...] = ()
    question: Annotated[bytes, Meta(max_length=QUESTION_BYTES)] = b""
    attributes: tuple[AttributeUpdate, ...] = ()
    schema: SchemaChange | None = None
    cut: Annotated[int, Meta(ge=0)] | None = None
    settings_version: Annotated[int, Meta(ge=0)] | None = None
    undoes: int | None = None
    truncates: int | None = None
    tombstone: Antichain | None = None
    erasure: NewErasure | None = None
    passes: PassedCut | None = None


class Effects(Record, frozen=True):
    """What a rewrite does, as its parts tell.

    `as_of` is the time that it is about, and `point` the time by which the commit history names it, if it does.
    `scopes`: of each of these one is needed. `removes`: it takes rows away, and adds none. In a shard that is fed by
    `append` it is refused (`refused_fed`), or it `waits` for the next time. `takes_time`, `is_remembered`: also without
    rows.
    """

    is_consistent: bool
    as_of: int
    point: int | None
    scopes: tuple[tuple[str, ...], ...]
    removes: bool
    refused_fed: bool
    waits: bool
    takes_time: bool
    is_remembered: bool


_SCOPES: Mapping[str, tuple[str, ...]] = {
    "erasure": (ADMIN,),
    "schema": (MANAGE,),
    "settings_version": (MANAGE, MAINTAIN),
    "truncates": (WRITE, MAINTAIN),
    "before": (WRITE, MAINTAIN),
    "attributes": (WRITE,),
    "undoes": (WRITE,),
    "cut": (WRITE,),
    "clears": (WRITE,),
    "passes": (MANAGE, MAINTAIN),
}
_ROWS, _WRITTEN = frozenset({"runs"}), frozenset({"runs", "attributes"})
_MAIN: Mapping[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "undoes": ((RESTORE,), _WRITTEN),
    "truncates": ((TRUNCATE,), _ROWS | {"passes"}),
    "settings_version": ((TRUNCATE,), _ROWS),
    "before": ((DROP_BEFORE,), frozenset({"passes"})),
    "erasure": ((ERASE,), _ROWS),
    "cut": ((INSERT,), _WRITTEN),
    "": (tuple(verb for verb in EDITS if verb != INSERT), _WRITTEN | {"schema", "clears"}),
}
"""Of the part that tells operations apart: what they are called, and the parts that may come with it."""
_REMOVING = frozenset({"truncates", "settings_version", "before", "erasure"})
_WAITING = frozenset({"before", "erasure"})


def effects(rewrite: Rewrite) -> Effects:
    """What the parts of a rewrite come to. Raises nothing: `is_consistent` tells whether they belong together."""
    parts = _parts(rewrite)
    main = min(parts & _MAIN.keys(), default="")
    operations, beside = _MAIN[main]
    cut = rewrite.truncates if rewrite.tombstone is None else rewrite.tombstone.element
    about = rewrite.undoes if cut is None else cut - 1
    at_once = not rewrite.expected_upper.is_empty if rewrite.erasure is None else rewrite.erasure.force
    return Effects(
        is_consistent=rewrite.operation in operations and parts - {main} <= beside,
        as_of=rewrite.as_of if about is None else about,
        point=rewrite.undoes if cut is None else cut,
        scopes=tuple(dict.fromkeys(_SCOPES[part] for part in sorted(parts - _ROWS))) or ((WRITE,),),
        removes=main in _REMOVING,
        refused_fed=main not in _WAITING and main != "cut",
        waits=main in _WAITING and not at_once,
        takes_time=main in ("settings_version", "erasure") or (main == "undoes" and not rewrite.attributes),
        is_remembered=main not in ("", "cut") or bool(rewrite.attributes),
    )


def scopes_of(command: Command) -> tuple[tuple[str, ...], ...]:
    """Of each of these one scope is needed to send the command."""
    return effects(command).scopes if isinstance(command, Rewrite) else (command.scopes,)


def _parts(rewrite: Rewrite) -> frozenset[str]:
    """The parts that are present. A tombstone is `before` a time, or `clears` the shard."""
    clears = rewrite.tombstone is not None and rewrite.tombstone.is_empty
    present = {
        "runs": bool(rewrite.runs),
        "attributes": bool(rewrite.attributes),
        "schema": rewrite.schema is not None,
        "cut": rewrite.cut is not None,
        "settings_version": rewrite.settings_version is not None,
        "undoes": rewrite.undoes is not None,
        "truncates": rewrite.truncates is not None,
        "before": rewrite.tombstone is not None and not clears,
        "clears": clears,
        "erasure": rewrite.erasure is not None,
        "passes": rewrite.passes is not None,
    }
    return frozenset(part for part, is_there in present.items() if is_there)
