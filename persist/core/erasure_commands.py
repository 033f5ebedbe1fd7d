"""Commands of erasures. `commands` has all of their names too."""

from __future__ import annotations

from typing import Annotated, ClassVar

from persist.core.command import ADMIN, MaintainCommand
from persist.core.erasure import DEADLINE_MS_MAX, QUESTION_BYTES, Doomed, Proof
from persist.core.record import Meta
from persist.core.rewrite_commands import Rewrite


class Erase(Rewrite, frozen=True, kw_only=True):
    """The rows take away what is to be erased as of `as_of`, the latest time. -> Appended

    The State remembers the erasure under its `erasure` id. The shard itself lets history before it go, its commit
    history too, and with `tags` all earlier tags. It takes a time also where no row is to go. In a shard that is fed by
    `append` it takes none without `force`: it is pending until the writer completes the next time, and the interval is
    empty. `pending` erasures were there when the rows were worked out; UpperMismatch where there are others now.
    """

    scopes: ClassVar[tuple[str, ...]] = (ADMIN,)

    erasure: Annotated[str, Meta(pattern="^e[0-9a-f]{32}$")]
    question: Annotated[bytes, Meta(max_length=QUESTION_BYTES)] = b""
    deadline_ms: Annotated[int, Meta(ge=1, le=DEADLINE_MS_MAX)] | None = None
    reason: str = ""
    tags: bool = False
    pending: Annotated[int, Meta(ge=0)] = 0
    force: bool = False


class ReadErasures(MaintainCommand, frozen=True):
    """The shard's erasures as of now, and what each waits for. -> ErasuresAre; changes nothing."""


class NoteRewritten(MaintainCommand, frozen=True):
    """From now on no part of the shard shows the rows of this erasure; `doomed` are blobs that did. -> ErasuresAre

    Changes nothing where a part may still show them, or where it was noted before.
    """

    erasure: str
    doomed: Doomed


class ProveErasure(MaintainCommand, frozen=True):
    """Both stores were looked through, and nothing of this erasure is left. -> ErasuresAre

    Changes nothing where a rollup of before `rewritten` is still named, or where it was proved before.
    """

    erasure: str
    proof: Proof
