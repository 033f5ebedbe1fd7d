"""Commands whose outcome is known: retries with one token, and the digest that a token stands for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from persist.client import deadlines
from persist.client.transport import Transport
from persist.commit.clocks_and_ids import jittered
from persist.core import commands as c
from persist.core import errors
from persist.core.attribute import AttributeUpdate
from persist.core.audit_log import DIGEST_BYTES, NOBODY, Caller
from persist.core.batch import Part, Run
from persist.core.errors import Indeterminate, InvalidUsage, Overloaded, PersistError, Unavailable, UpperMismatch
from persist.core.frontier import Antichain
from persist.core.record import replace
from persist.parts.row_stats import MODULUS as MODULUS
from persist.parts.row_stats import digest_of_rows as digest_of_rows
from persist.telemetry.tracing import Requesting

BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 2.0
DOUBLINGS_MAX = 10
# What these change, if anything, is a hold or a registration, which lapses. A try of unknown outcome does no harm.
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
    c.ReadErasures,
)
# These say nothing about whether the command happened, so they are raised whatever came before.
CLAIM_NOTHING = (errors.Corruption, PersistError)
_T = TypeVar("_T")
_R = TypeVar("_R", bound=c.Result)


class RetriedCall(NamedTuple):
    """What is called, for messages, and of which shard."""

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
    """Apply a command, and retry it for up to `retry_s` seconds if that is safe. Raises what `settled` raises.

    `before`: the error of a first try, which the caller made.
    """
    answers = [] if before is None else [before]

    def ask() -> c.Result:
        if answers:
            raise answers.pop()
        return transport.apply(name, command, caller)

    has_token = isinstance(command, c.WriterCommand)
    return call_with_retries(
        ask,
        RetriedCall(f"a command on shard {name!r}", name),
        transport,
        retry_s,
        remedy="call again with its token" if has_token else "look at the shard before you continue",
        lapses=isinstance(command, LAPSING),
    )


def send_for(
    kind: type[_R], transport: Transport, name: str, command: c.Command, retry_s: float, caller: Caller = NOBODY
) -> _R:
    """As `send`, for a command whose result is of this kind."""
    result = send(transport, name, command, retry_s, caller)
    assert isinstance(result, kind)
    return result


def call_with_retries(
    ask: Callable[[], _T], call: RetriedCall, transport: Transport, retry_s: float, *, remedy: str, lapses: bool = False
) -> _T:
    """What `ask` returns, which is retried for up to `retry_s` seconds. `call` is for messages.

    All tries are one request, with one id. Many in a row are one line of the log.

    Raises Indeterminate if it may have happened, or may happen yet: the outcome of a try is unknown, and then the
    deadline passed, or a later try was refused. A stopped server or a proxy may hold the request of that try, and
    deliver it when the reason of the refusal has gone. Only a refusal that stays valid is raised as it is (see
    `is_final`). Every other error, except Corruption and the root of the tree, means that it did not happen and never
    will. What changes no data, and lapses (`lapses`), is never Indeterminate: it is retried. An earlier deadline of the
    current call applies, too; after it nothing is started.
    """
    what, shard = call
    deadlines.check(what)
    deadline = transport.clock.monotonic() + deadlines.at_most(retry_s)
    unknown = False
    tries = 0
    with Requesting() as request:
        while True:
            try:
                return ask()
            except (Unavailable, Overloaded, Indeterminate) as error:
                if lapses and isinstance(error, Unavailable) and error.is_unwritable:
                    raise  # do not wait for a full disk: reads continue without it
                unknown = unknown or (isinstance(error, Indeterminate) and not lapses)
                tries += 1
                wait = _wait_s(error, tries, transport)
                is_hopeless = isinstance(error, Unavailable) and error.is_read_only
                if is_hopeless or transport.clock.monotonic() + wait > deadline:
                    if lapses and isinstance(error, Indeterminate):
                        raise Unavailable(f"{what}, which changes no data, was not answered; repeat it") from error
                    if unknown and not isinstance(error, Indeterminate):
                        raise Indeterminate(f"{what} may have happened; {remedy} ({error})") from error
                    raise
                transport.storms.again("client", shard, tries, error, request.id)
                transport.clock.sleep(wait)
            except PersistError as error:
                if not request.id:  # otherwise a server has logged it, under this id
                    transport.storms.corrupted(shard, error, what)
                if not unknown or type(error) in CLAIM_NOTHING or is_final(error):
                    raise
                raise Indeterminate(
                    f"{what} may have happened, or may yet: one try was not answered, and the next was refused "
                    f"({error}); {remedy}",
                    refused=error.kind,
                    **error.details,
                ) from error


def landed_or_none(ask: Callable[[], c.Appended]) -> c.Appended | None:
    """The answer to a write that can never land: the interval if its token has landed; None: it has not."""
    try:
        return ask()
    except UpperMismatch:
        return None
    except Indeterminate as error:  # from a try without an answer, which changes nothing either
        if error.details.get("refused") != UpperMismatch.kind:
            raise
        return None


@contextmanager
def after_commit(what: str) -> Iterator[None]:
    """For reads after a committed change: Unavailable, Overloaded and InvalidUsage (the client was closed) would say
    that nothing has happened.

    Raises Indeterminate instead. Repeating the change, with its token if it has one, is safe.
    """
    try:
        yield
    except (Unavailable, Overloaded, InvalidUsage) as error:
        raise Indeterminate(
            f"{what} is committed, and its result is not known now ({error.message}); repeat it to see it, with "
            "its token if it has one"
        ) from error


def is_final(error: PersistError) -> bool:
    """Whether the refusal proves that no try of the same command has landed, and that none ever will.

    That holds for an upper beyond the expected one, since it never moves back, and a token is looked up first.
    Attributes and readers may return to their old state, and permissions may be granted again. A refusal that may not
    stay valid says so (`stays`).
    """
    if not isinstance(error, UpperMismatch) or error.details.get("stays") is False:
        return False
    try:
        expected = error.details["expected"]  # None: an insert, which is refused only if no time is left
        return expected is None or Antichain.from_json(error.details["actual"]) > Antichain.from_json(expected)
    except (KeyError, InvalidUsage):  # not from a server of persist
        return False


def _wait_s(error: Exception, tries: int, transport: Transport) -> float:
    if isinstance(error, Overloaded):
        retry_after_s = error.details.get("retry_after_s")
        if isinstance(retry_after_s, (int, float)) and retry_after_s > 0:
            return float(retry_after_s)
    return jittered(transport.ids, min(BACKOFF_FIRST_S * 2 ** min(tries, DOUBLINGS_MAX), BACKOFF_MAX_S))


# What a token stands for: a digest of the verb, the frontiers, the attributes and the rows of a command.
#
# Keys of parts do not count: an honest retry stages its rows anew. A field that a later version adds to a command must
# not count either while it has its default, so that a retry by that version is recognised. The rows count by the sum of
# the digests of the parts, so it does not matter how they were cut into parts, or whether they were staged before.


def digest_of(command: c.WriterCommand) -> bytes:
    """The digest of a command. Raises InvalidUsage if a part lacks the digest of its rows."""
    if isinstance(command, c.Rewrite):
        return _digest(_rewrite_question(command))
    question: list[object] = [type(command).__name__]
    assert isinstance(command, (c.CompareAndAppend, c.Append, c.Insert, c.UpdateAttributes))
    if isinstance(command, c.CompareAndAppend):
        question += [command.expected_upper.to_json(), command.new_upper.to_json()]
    elif isinstance(command, c.Append):
        question += [command.lower.to_json(), command.upper.to_json()]
    question.append(_attributes(command.attributes))
    if not isinstance(command, c.UpdateAttributes):
        question.append(_rows(command))
    return _digest(question)


def _rewrite_question(command: c.Rewrite) -> list[object]:
    """The operation, its target and its question, but not its rows: a retry computes other rows.

    The first word is the former name of the command of each operation.
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


def with_id_digests(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The runs, with parts that a token recognises by their ids only, not by their rows."""

    def by_id(part: Part) -> Part:
        digest = hashlib.blake2b(part.id.encode(), digest_size=8).digest()
        return replace(part, rows_digest=int.from_bytes(digest) % MODULUS)

    return tuple(Run(tuple(map(by_id, run.parts))) for run in runs)


def _digest(question: list[object]) -> bytes:
    return hashlib.blake2b(json.dumps(question).encode(), digest_size=DIGEST_BYTES).digest()


def _rows(command: c.Insert | c.CompareAndAppend | c.Append) -> list[tuple[str, int]]:
    """The digests of the rows by the time that was chosen for them after they were staged (None: no time was)."""
    sums: dict[str, int] = {}
    for part in (part for run in command.runs for part in run.parts):
        if part.rows_digest is None:
            raise InvalidUsage(f"part {part.id} lacks the digest of its rows, which a token needs; stage them again")
        time = str(part.time)
        sums[time] = (sums.get(time, 0) + part.rows_digest) % MODULUS
    return sorted((time, total) for time, total in sums.items() if total)
