"""Commands whose outcome is known: retries with one token, and the digest that a token stands for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from persist.client import deadlines
from persist.client.transport import OneShard, Transport
from persist.commit.system import jittered
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.audit_log import NOBODY, Caller
from persist.core.batch import Part, Run
from persist.core.dedup import DIGEST_BYTES
from persist.core.errors import (
    Corruption,
    Indeterminate,
    InvalidUsage,
    Overloaded,
    PersistError,
    Unavailable,
    UpperMismatch,
)
from persist.core.frontier import Antichain
from persist.core.record import replace
from persist.core.shard_view import ShardDetails, ViewRequest
from persist.parts.row_stats import MODULUS as MODULUS
from persist.parts.row_stats import digest_of_rows as digest_of_rows
from persist.telemetry.tracing import Request, Requesting

# Sending commands so that their outcome is known: retries with the same token, within a deadline.


BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 2.0
DOUBLINGS_MAX = 10
# What these change, if anything, lapses by itself: a hold or a registration. A try of unknown outcome harms nobody.
LAPSING = (
    c.ExpireWriter,
    c.RegisterReader,
    c.DowngradeSince,
    c.ExpireReader,
    c.ReadAttributes,
    c.ScanAttributes,
    c.ResolveTime,
    c.TimesShown,
    c.ReadRetention,
)
# These claim nothing of what happened, so they are told whatever came before.
CLAIM_NOTHING = (Corruption, PersistError)
_T = TypeVar("_T")


class RetriedCall(NamedTuple):
    """What is asked for, in words, and of which shard."""

    what: str
    shard: str


def send(
    transport: Transport,
    name: str,
    command: c.Command,
    retry_s: float,
    caller: Caller = NOBODY,
    before: PersistError | None = None,
) -> c.Result:
    """Apply a command, retrying what is safe to retry for up to `retry_s` seconds. Raises what `settled` raises.

    `before`: what a first try, which the caller made, was answered.
    """
    answers = [] if before is None else [before]

    def ask() -> c.Result:
        if answers:
            raise answers.pop()
        return transport.apply(name, command, caller)

    has_token = isinstance(command, c.WriterCommand)
    return settled(
        ask,
        RetriedCall(f"a command on shard {name!r}", name),
        transport,
        retry_s,
        remedy="call again with its token" if has_token else "look at the shard before you go on",
        lapses=isinstance(command, LAPSING),
    )


def read_details(transport: OneShard, name: str, retry_s: float) -> ShardDetails:
    """The settings, tags and critical readers of a shard as of now. Raises what every call may."""
    request = ViewRequest(with_batches=False, with_details=True)
    asked = RetriedCall(f"a view of shard {name!r}", name)
    view = settled(lambda: transport.view(name, request), asked, transport, retry_s, remedy="repeat it", lapses=True)
    assert view.details is not None
    return view.details


def settled(
    ask: Callable[[], _T],
    asked: RetriedCall,
    transport: Transport,
    retry_s: float,
    *,
    remedy: str,
    lapses: bool = False,
) -> _T:
    """What `ask` returns, which is tried again for up to `retry_s` seconds. `asked` is for messages.

    All tries are one request, with one id. Many in a row are one line of the log.

    Raises Indeterminate where it may have happened, or may happen yet: the outcome of a try is unknown, and then the
    deadline passed, or a later try was refused. A server that was stopped, or a proxy, may hold the request of that
    try, and deliver it when what the refusal tells holds no more. Only a refusal that stays true is told as it is (see
    `is_final`). Every other error, but for Corruption and the root of the tree, means that it did not happen and never
    will. What changes no data, and lapses by itself (`lapses`), is never Indeterminate: it is asked again. Where the
    call under way has a deadline, that counts if it is earlier, and what comes after it is not asked at all.
    """
    with Requesting() as request:
        return _settled(ask, asked, transport, retry_s, request, (remedy, lapses))


def _settled(
    ask: Callable[[], _T],
    asked: RetriedCall,
    transport: Transport,
    retry_s: float,
    request: Request,
    how: tuple[str, bool],
) -> _T:
    (what, shard), (remedy, lapses) = asked, how
    deadlines.check(what)
    deadline = transport.clock.monotonic() + deadlines.at_most(retry_s)
    unknown = False
    tries = 0
    while True:
        try:
            return ask()
        except (Unavailable, Overloaded, Indeterminate) as error:
            if lapses and isinstance(error, Unavailable) and error.is_unwritable:
                raise  # a full disk is not waited for: what only reads goes on without
            unknown = unknown or (isinstance(error, Indeterminate) and not lapses)
            tries += 1
            wait = _wait_s(error, tries, transport)
            if transport.clock.monotonic() + wait > deadline:
                if lapses and isinstance(error, Indeterminate):
                    raise Unavailable(f"{what}, which changes no data, was not answered; repeat it") from error
                if unknown and not isinstance(error, Indeterminate):
                    raise Indeterminate(f"{what} may have happened; {remedy} ({error})") from error
                raise
            transport.storms.again("client", shard, tries, error, request.id)
            transport.clock.sleep(wait)
        except PersistError as error:
            if not request.id:  # else a server has told it, under this id
                transport.storms.corrupted(shard, error, what)
            if not unknown or type(error) in CLAIM_NOTHING or is_final(error):
                raise
            raise Indeterminate(
                f"{what} may have happened, or may yet: one try was not answered, and the next was refused ({error}); "
                f"{remedy}",
                refused=error.kind,
                **error.details,
            ) from error


@contextmanager
def after_commit(what: str) -> Iterator[None]:
    """For looks at what a committed change came to: Unavailable and Overloaded would say that nothing has happened.

    Raises Indeterminate in their place. Repeating the change, with its token if it has one, is safe.
    """
    try:
        yield
    except (Unavailable, Overloaded) as error:
        raise Indeterminate(
            f"{what} is committed, and what came of it is not known now ({error.message}); repeat it to see it, with "
            "its token if it has one"
        ) from error


def is_final(error: PersistError) -> bool:
    """Whether the refusal proves that no try of the same command has landed, and that none ever will.

    That is so of an upper beyond the one that is needed, since it never moves back, and a token is looked up first.
    Attributes and readers may come back to what they were, and rights may be given again. A refusal says itself where
    it may not stay (`stays`).
    """
    if not isinstance(error, UpperMismatch) or error.details.get("stays") is False:
        return False
    try:
        expected = error.details["expected"]  # None: an insert, which is refused only where no time is left
        return expected is None or Antichain.from_json(error.details["actual"]) > Antichain.from_json(expected)
    except (KeyError, InvalidUsage):  # not a server of persist
        return False


def _wait_s(error: Exception, tries: int, transport: Transport) -> float:
    if isinstance(error, Overloaded):
        asked = error.details.get("retry_after_s")
        if isinstance(asked, (int, float)) and asked > 0:
            return float(asked)
    return jittered(transport.ids, min(BACKOFF_FIRST_S * 2 ** min(tries, DOUBLINGS_MAX), BACKOFF_MAX_S))


# What a token stands for: a digest of the verb, the frontiers, the attributes and the rows of a command.
#
# Keys of parts do not count: an honest retry stages its rows anew. A field that a later build adds to a command must
# not count either while it has its default, so that a retry by that build is known. The rows count by the sum of the
# digests of the parts, so it does not matter how they were cut into parts, nor whether they were staged before the
# command.


def digest_of(command: c.WriterCommand, rows: int | None = None) -> bytes:
    """The digest of a command. Raises InvalidUsage where a part does not tell the digest of its rows.

    `rows`: the digest of those that a command without parts would have, if their times are their own.
    """
    if isinstance(command, c.Rewrite):
        return _digest(_asked(command))
    said: list[object] = [type(command).__name__]
    assert isinstance(command, (c.CompareAndAppend, c.Append, c.Insert, c.UpdateAttributes))
    if isinstance(command, c.CompareAndAppend):
        said += [command.expected_upper.to_json(), command.new_upper.to_json()]
    elif isinstance(command, c.Append):
        said += [command.lower.to_json(), command.upper.to_json()]
    said.append(_attributes(command.attributes))
    if not isinstance(command, c.UpdateAttributes):
        said.append(_rows(command) if rows is None else [("None", rows)] if rows else [])
    return _digest(said)


def _asked(command: c.Rewrite) -> list[object]:
    """The operation, its target and its question, whatever was there by then: a retry finds other rows.

    The first word is what each operation was called when it was a command of its own.
    """
    if command.operation in c.EDITS:
        return ["Edit" if command.schema is None else "Reshape", command.operation, command.question.hex()]
    if command.erasure is not None:
        return ["Erase", command.question.hex(), command.erasure.tags]
    name = "".join(word.title() for word in command.operation.split("_"))
    named = name if command.settings_version is None else "RetractAged"
    return [named, c.effects(command).as_of, *([_attributes(command.attributes)] if command.attributes else [])]


def _attributes(changes: tuple[AttributeUpdate, ...]) -> list[tuple[object, ...]]:
    return [(change.key, change.verb, change.value, change.expected) for change in changes]


def standing_for_themselves(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The runs, whose parts a token does not know again where their rows come in other parts."""
    return tuple(Run(tuple(replace(part, rows_digest=_by_id(part)) for part in run.parts)) for run in runs)


def _by_id(part: Part) -> int:
    return int.from_bytes(hashlib.blake2b(part.id.encode(), digest_size=8).digest()) % MODULUS


def _digest(said: list[object]) -> bytes:
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=DIGEST_BYTES).digest()


def _rows(command: c.Insert | c.CompareAndAppend | c.Append) -> list[tuple[str, int]]:
    """The digests of the rows by the time that was chosen for them after they were staged (None: none was)."""
    sums: dict[str, int] = {}
    for part in (part for run in command.runs for part in run.parts):
        if part.rows_digest is None:
            raise InvalidUsage(
                f"part {part.id} does not tell the digest of its rows, which a token needs; stage its rows again"
            )
        time = str(part.time)
        sums[time] = (sums.get(time, 0) + part.rows_digest) % MODULUS
    return sorted((time, found) for time, found in sums.items() if found)
