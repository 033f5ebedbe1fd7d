"""Turns, for whose time those who wait leave a letter (`consensus.letters`).

Who has the turn does what the letters ask for together with its own, and answers them: nobody else reads what was
committed, and all of it costs one write. When it is done it wakes the one that waits and knows most of the key. Who is
not woken looks now and then whether the turn is free: so all go on where the one that was woken ended, or was stopped.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial

from blob.private import make_file
from consensus.letters import LETTER_BYTES_MAX, Head, Slot, Slots, are_possible
from consensus.turns import DISTRUST_S, FileTurns, Had, Left, Letter, Turn

LOOK_S = 0.05  # who left a letter looks so often by itself whether the turn is free
STAND_IN = 1 << 33  # from the place of a turn to that of another one, for those who have waited for it in vain


class LetterTurns(FileTurns):
    """As `FileTurns`. Where letters are not possible, whoever has one just waits. Thread-safe."""

    def __init__(
        self,
        path: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        super().__init__(path, monotonic=monotonic)
        self._random = random
        self._slots: Slots | None = None  # guarded by the lock, as the three below
        self._letter_file: int | None = None
        self._is_tried = False
        self._users = 0  # of the slots: the last one closes their file

    @contextlib.contextmanager
    def turn_or_answer(self, key: str, wait_s: float, letter: Letter) -> Iterator[Had]:
        """As `turn`, or have the letter answered by who has the turn. Raises nothing."""
        place = zlib.crc32(key.encode())
        with self._used() as slots:
            try:
                if slots is None:
                    had = Had(self._take(place, wait_s))
                elif self._try(place):
                    had = Had(Turn.AT_ONCE, letters=partial(_taken, slots, place, key))
                elif wait_s <= 0:
                    had = Had(Turn.NONE)
                else:
                    if self._monotonic() < self._distrusted_until:  # those who waited in vain go on among themselves
                        place += STAND_IN
                    had = self._had(slots, place, key, wait_s, letter)
            except BaseException:  # Ctrl-C
                self._end(slots, place)
                raise
            try:
                yield had
            finally:
                if had.turn is not Turn.NONE:
                    self._end(slots, place)

    def wipe(self) -> None:
        """Overwrite the letters that processes have left which ended. May raise OSError."""
        with self._used() as slots:
            if slots is not None:
                slots.wipe()

    def close(self) -> None:
        super().close()
        with self._lock:
            self._close_unused()

    def _had(self, slots: Slots, place: int, key: str, wait_s: float, letter: Letter) -> Had:
        """The turn of a place that was not free, or what the letter was answered."""
        letters = partial(_taken, slots, place, key)
        data = letter.data()
        slot = slots.borrow() if data is not None and len(data) <= LETTER_BYTES_MAX else None
        if slot is None or data is None:
            return Had(self._take(place, wait_s), letters=letters)
        try:
            slot.leave(place, key, letter.seen, data)
        except OSError:  # the disk is full, perhaps
            slots.give_back(slot)
            return Had(self._take(place, wait_s), letters=letters)
        turn, answer, is_doubtful = Turn.NONE, None, True
        try:
            turn = self._waited(slot, place, wait_s)
            answer = slot.answer()
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError):
                is_doubtful = slot.withdraw()
            slots.give_back(slot)
        if answer is None:
            return Had(turn, is_doubtful=is_doubtful, letters=letters)
        if turn is not Turn.NONE:
            self._end(slots, place)
        return Had(Turn.NONE, answer[0], answer[1])

    def _waited(self, slot: Slot, place: int, wait_s: float) -> Turn:
        """The turn, or NONE once the letter was answered, or nobody has answered it in time.

        The turn is tried once the letter lies there: who ends its turn before that does not see the letter.
        """
        end = self._monotonic() + wait_s
        while not self._try(place):
            left = end - self._monotonic()
            if left <= 0:
                self._distrusted_until = self._monotonic() + DISTRUST_S
                return Turn.NONE
            if self._is_closed:
                return Turn.NONE
            slot.wait(min(left, LOOK_S))
            if slot.answer() is not None:
                return Turn.NONE
        return Turn.WAITED

    def _end(self, slots: Slots | None, place: int) -> None:
        """End the turn, and wake who is to have the next one."""
        self._unlock(place)
        if slots is None:
            return
        with contextlib.suppress(OSError):
            for head in sorted(slots.left(place), key=_seen, reverse=True):
                if not slots.is_answered(head):
                    slots.wake(head)
                    return

    @contextlib.contextmanager
    def _used(self) -> Iterator[Slots | None]:
        """The slots, whose file stays open meanwhile. None: there are none here."""
        with self._lock:
            if not self._is_tried and not self._is_closed:
                self._is_tried = True
                with contextlib.suppress(OSError):
                    self._open_slots()
            slots = None if self._is_closed else self._slots
            self._users += slots is not None
        try:
            yield slots
        finally:
            if slots is not None:
                with self._lock:
                    self._users -= 1
                    self._close_unused()

    def _open_slots(self) -> None:
        make_file(self._path)
        file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if are_possible(file):
            self._letter_file, self._slots = file, Slots(file, self._random)
        else:
            os.close(file)

    def _close_unused(self) -> None:
        """Under the lock. A file that somebody may still write to stays open: its number may become another file's."""
        if not self._is_closed or self._users or self._slots is None or self._letter_file is None:
            return
        self._slots.close()
        os.close(self._letter_file)
        self._slots = self._letter_file = None


def _seen(head: Head) -> int:
    return head.seen


def _taken(slots: Slots, place: int, key: str, most: int) -> list[Left]:
    """The letters for this key, at most `most` of them."""
    found: list[Left] = []
    with contextlib.suppress(OSError):
        for head in slots.left(place)[:most]:
            taken = slots.take(head, key)
            if taken is not None:
                found.append(Left(*taken, partial(_answer, slots, head, taken[1])))
    return found


def _answer(slots: Slots, head: Head, is_again: bool, data: bytes) -> None:
    with contextlib.suppress(OSError):  # then its sender does it itself
        slots.answer(head, data, is_again)
