"""Commits for the other processes of a machine: who has the turn commits what those who wait have left for it.

Such a command is as a request that a server took: it has a token, so that it may come twice, and whoever is not
answered commits it itself. Nobody relies on an answer. A refusal counts only where nobody else may still commit the
command, after another change: else it is told as Indeterminate, and the caller repeats it with the same token.

A command comes with the verdict of its own process, which compared its parts with their rows. Who may leave a letter
may write the log as well: both are files of one user alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from msgspec import Struct

from consensus.letters import ANSWER_BYTES_MAX
from consensus.turns import Had, Left, Turn
from consensus.turns import Letter as Leaving
from persist.commit.command_queue import ENDING, Pending
from persist.commit.commit_plan import Outcome
from persist.commit.versions import Versions
from persist.core import commands as c
from persist.core.errors import Indeterminate, PersistError
from persist.core.recorded import Caller
from persist.core.transitions.context import Verdict
from persist.formats.letters import Forwarded, Letter, decode_answer, decode_letter, encode_answer, encode_letter

TURN_S = 1.0  # for which a commit waits for those of other processes
COMMANDS_MAX = 32  # of one letter
ALONE = (*ENDING, c.Drop, c.BeginClone, c.HandOver, c.TakeBack)  # nothing of others is committed with these
UNKNOWN = b""  # the answer that nobody knows what became of a letter
DECLINED = b"-"  # the answer that nothing was done for it, nor will be


class Settled(Struct, frozen=True):
    """What a group came to. The shard has that seqno now; `is_changed`: by a commit of this process."""

    outcomes: Sequence[Outcome]
    seqno: int
    is_changed: bool


class OurTurn:
    """A turn to commit, or what another process has answered: `answered`. `is_late`: others had theirs before."""

    def __init__(self, had: Had, group: Sequence[Pending], answered: Settled | None = None) -> None:
        self.answered = answered
        self.is_late = had.turn is Turn.WAITED
        self.is_doubtful = had.is_doubtful
        self._had = had
        self._group = group
        self._taken: list[tuple[Left, int]] = []  # letters that are not answered yet, and how many commands each has

    def others(self, most: int) -> list[Pending]:
        """The commands that others have left, at most about `most`, to be committed after the group's own."""
        if any(isinstance(one.command, ALONE) for one in self._group):
            return []
        found: list[Pending] = []
        for left in self._had.letters(max(0, most // COMMANDS_MAX)):
            try:
                letter = decode_letter(left.data)
            except PersistError:  # of a newer build, perhaps
                left.answer(DECLINED)
                continue
            found += map(_pending, letter.commands, letter.verdicts, letter.callers)
            self._taken.append((left, len(letter.commands)))
        return found

    def tell(self, outcomes: Sequence[Outcome], seqno: int) -> None:
        """Answer those who have left `others`."""
        begin = 0
        while self._taken:
            left, count = self._taken[0]
            left.answer(_encoded(outcomes[begin : begin + count], seqno, left.is_again))
            self._taken.pop(0)
            begin += count

    def tell_none(self, answer: bytes) -> None:
        """Answer them that nothing was done for them, or that nobody knows."""
        while self._taken:
            left, _ = self._taken.pop(0)
            left.answer(answer)

    def sure(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """The group's outcomes, as far as another process may not still change them."""
        return [_doubted(one) for one in outcomes] if self.is_doubtful else outcomes


class Post:
    """Turns to commit on the shard `name`, for which letters are left. Thread-safe."""

    def __init__(self, name: str, versions: Versions) -> None:
        self._name = name
        self._versions = versions

    @contextlib.contextmanager
    def turn(self, group: Sequence[Pending], seen: int) -> Iterator[OurTurn]:
        """Have the turn while the `with` lasts, or the answer of who had it. `seen`: the seqno that is known here."""
        consensus = self._versions.consensus
        leaving = Leaving(lambda: _letter(group), seen)
        with consensus.turn_or_answer(self._name, TURN_S, leaving) as had:
            if had.answer is None:
                with _kept(OurTurn(had, group)) as ours:
                    yield ours
                return
        answered, is_doubtful = _answered(had.answer, len(group)), had.is_doubtful
        if answered is not None:
            ours = OurTurn(had, group, answered)
            ours.answered = Settled(ours.sure(answered.outcomes), answered.seqno, False)
            yield ours
            return
        with consensus.turn(self._name, TURN_S) as turn:
            is_doubtful = is_doubtful or had.answer != DECLINED
            with _kept(OurTurn(Had(turn, is_doubtful=is_doubtful), group)) as ours:
                yield ours


@contextlib.contextmanager
def _kept(ours: OurTurn) -> Iterator[OurTurn]:
    """Nobody who left a letter waits for longer than the turn, and no error claims more than is known."""
    answer = UNKNOWN
    try:
        yield ours
    except PersistError as error:
        answer = UNKNOWN if isinstance(error, Indeterminate) else DECLINED
        told = _doubted(error) if ours.is_doubtful else error
        if told is error:
            raise
        assert isinstance(told, Indeterminate)
        raise told from error
    finally:
        ours.tell_none(answer)


def _letter(group: Sequence[Pending]) -> bytes | None:
    """The group as a letter. None: it is to be committed by this process."""
    if len(group) > COMMANDS_MAX:
        return None
    commands = tuple(pending.command for pending in group)
    if not all(isinstance(one, Forwarded) for one in commands) or any(pending.verdict.kind for pending in group):
        return None
    letter = Letter(
        commands,  # type: ignore[arg-type]  # as it was looked at
        tuple(pending.verdict for pending in group),
        tuple(pending.caller for pending in group),
    )
    try:
        return encode_letter(letter)
    except PersistError:
        return None


def _pending(command: c.Command, verdict: Verdict, caller: Caller) -> Pending:
    return Pending(command, _nobody, _nobody, verdict, caller)


def _nobody(*_: object) -> None:
    """Who left a letter is told by its answer."""


def _encoded(outcomes: Sequence[Outcome], seqno: int, is_again: bool) -> bytes:
    try:
        answer = encode_answer(seqno, outcomes)
    except PersistError:
        return UNKNOWN
    return answer if len(answer) <= ANSWER_BYTES_MAX else UNKNOWN


def _answered(data: bytes, count: int) -> Settled | None:
    """What a group of so many commands was answered. None: this process has to commit it."""
    if data in (UNKNOWN, DECLINED):
        return None
    try:
        seqno, outcomes = decode_answer(data)
    except PersistError:
        return None
    if len(outcomes) != count:
        return None
    return Settled([_unsure() if one is None else one for one in outcomes], seqno, False)


def _doubted(outcome: Outcome) -> Outcome:
    if not isinstance(outcome, PersistError) or isinstance(outcome, Indeterminate):
        return outcome
    return _unsure(outcome)


def _unsure(refused: PersistError | None = None) -> Indeterminate:
    told = "" if refused is None else f", and the next try was refused ({refused.message})"
    details = {} if refused is None else {**refused.details, "refused": refused.kind}
    error = Indeterminate(
        f"another process took this command to commit it, and did not answer{told}; retry with the same token",
        **details,
    )
    error.__cause__ = refused
    return error
