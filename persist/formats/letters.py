"""Commands that a process leaves for another one to commit, and what it is answered. Not durable: see 0029."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from persist.core import commands as c
from persist.core.errors import InvalidUsage, PersistError, from_kind
from persist.core.record import Record
from persist.core.recorded import Caller
from persist.core.transitions.context import Verdict
from persist.formats.records import decoded, encoded

Forwarded = c.Insert | c.CompareAndAppend | c.Append | c.UpdateAttributes
"""What may be committed by another process: it comes with a token, so it may come twice."""


class Letter(Record, frozen=True):
    """Commands in order, with what was found of their parts, and who gives them."""

    commands: tuple[Forwarded, ...]
    verdicts: tuple[Verdict, ...]
    callers: tuple[Caller, ...]


class Refusal(Record, frozen=True):
    """An error of the tree."""

    kind: str
    message: str
    details: Mapping[str, Any] = {}


class Told(Record, frozen=True):
    """What one command came to. Neither: whoever tried met something that is no error of the tree."""

    result: c.Appended | c.Done | None = None
    refusal: Refusal | None = None


class Answer(Record, frozen=True):
    """What the commands of a letter came to, in order; the shard has that seqno now."""

    seqno: int
    told: tuple[Told, ...]


_LETTER = msgspec.msgpack.Decoder(Letter)
_ANSWER = msgspec.msgpack.Decoder(Answer)


def encode_letter(letter: Letter) -> bytes:
    """Raises InvalidUsage: a command holds what no record can."""
    return encoded(letter)


def decode_letter(data: bytes) -> Letter:
    """Raises InvalidUsage on what is no letter, UpgradeNeeded on one of a newer build."""
    letter = decoded(_LETTER, data, "letter", InvalidUsage)
    if not len(letter.commands) == len(letter.verdicts) == len(letter.callers) > 0:
        raise InvalidUsage("a letter has not one verdict and one caller for each command")
    return letter


def encode_answer(seqno: int, outcomes: Sequence[object]) -> bytes:
    """Raises InvalidUsage: an outcome holds what no record can."""
    return encoded(Answer(seqno, tuple(_told(outcome) for outcome in outcomes)))


def decode_answer(data: bytes) -> tuple[int, list[c.Result | PersistError | None]]:
    """The seqno, and the outcomes. Raises InvalidUsage on what is no answer, UpgradeNeeded on one of a newer build."""
    answer = decoded(_ANSWER, data, "answer", InvalidUsage)
    return answer.seqno, [_outcome(told) for told in answer.told]


def _told(outcome: object) -> Told:
    if isinstance(outcome, PersistError):
        return Told(refusal=Refusal(outcome.kind, outcome.message, outcome.details))
    return Told(outcome) if isinstance(outcome, (c.Appended, c.Done)) else Told()


def _outcome(told: Told) -> c.Result | PersistError | None:
    if told.refusal is not None:
        return from_kind(told.refusal.kind, told.refusal.message, told.refusal.details)
    return told.result
