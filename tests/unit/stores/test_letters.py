"""Who waits for a turn leaves a letter. It is taken once it lies there whole, answered, and overwritten."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from consensus.letter_turns import LetterTurns
from consensus.letters import LETTER_BYTES_MAX, OWN_MAX, SLOTS, Head, Slot, Slots, are_possible
from consensus.sqlite import SqliteConsensus
from consensus.turns import DISTRUST_S, Had, Letter, Turn
from tests.support.turns import holding
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there are no letters on this system")

PLACE = 7
HOLDER = """
import sys
from consensus.letter_turns import LetterTurns
from consensus.turns import Letter
turns = LetterTurns(sys.argv[1])
with turns.turn_or_answer("orders", 0, Letter(lambda: None)) as had:
    print(had.turn.name, flush=True)
    for line in sys.stdin:
        taken = had.letters(10)
        print(len(taken), flush=True)
        for left in taken:
            if line == "answer\\n":
                left.answer(left.data.upper())
                sys.exit()
"""


@contextlib.contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process has the turn, and takes letters when it is told so: to answer them, or not."""
    with holding(HOLDER, str(path)) as holder:
        yield holder


def told(holder: subprocess.Popen[str], what: str) -> int:
    """How many letters the holder found when it was told that."""
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write(f"{what}\n")
    holder.stdin.flush()
    return int(holder.stdout.readline())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns"


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


@pytest.fixture
def both(path: Path) -> Iterator[tuple[Slots, Slots]]:
    """The slots of one process, which waits, and of another, which has the turn."""
    files = opened(path), opened(path)
    waiting, leading = (Slots(file, os.urandom) for file in files)
    yield waiting, leading
    for slots, file in zip((waiting, leading), files, strict=True):
        slots.close()
        os.close(file)


def lent(slots: Slots) -> Slot:
    slot = slots.borrow()
    assert slot is not None
    return slot


def left_again(waiting: Slots, leading: Slots) -> tuple[Slot, Head]:
    """A slot whose first letter was taken, and withdrawn without an answer, and the second one taken; the first."""
    slot = lent(waiting)
    slot.leave(PLACE, "orders", 0, b"one")
    [late] = leading.left(PLACE)
    leading.take(late, "orders")
    slot.withdraw()
    slot.leave(PLACE, "orders", 0, b"two")
    [head] = leading.left(PLACE)
    leading.take(head, "orders")
    return slot, late


def test_a_letter_is_taken_answered_and_overwritten(path: Path, both: tuple[Slots, Slots]) -> None:
    waiting, leading = both
    slot = lent(waiting)
    slot.leave(PLACE, "orders", 5, b"the rows")
    assert leading.left(PLACE + 1) == []
    [head] = leading.left(PLACE)
    assert (head.seen, leading.take(head, "others")) == (5, None), "it is for another key"
    assert leading.take(head, "orders") == (b"the rows", False)
    assert slot.answer() is None
    leading.answer(head, b"done", False)
    assert b"the rows" not in path.read_bytes(), "who left it may be stopped for long, and an erasure passes it over"
    slot.wait(WAIT_S)
    assert slot.answer() == (b"done", False)
    slot.withdraw()
    assert leading.left(PLACE) == []
    assert b"the rows" not in path.read_bytes()
    slot.leave(PLACE, "orders", 6, b"again")
    assert slot.answer() is None, "the answer was to the letter before"


def test_who_withdraws_a_letter_knows_whether_somebody_has_taken_it(both: tuple[Slots, Slots]) -> None:
    waiting, leading = both
    slot = lent(waiting)
    slot.leave(PLACE, "orders", 0, b"rows")
    [head] = leading.left(PLACE)
    assert slot.withdraw() is False
    assert leading.take(head, "orders") is None, "it was withdrawn"
    slot.leave(PLACE, "orders", 0, b"rows")
    assert leading.take(leading.left(PLACE)[0], "orders") is not None
    assert slot.withdraw() is True


def test_a_letter_that_was_taken_and_not_answered_is_taken_again_and_says_so(both: tuple[Slots, Slots]) -> None:
    waiting, leading = both
    slot = lent(waiting)
    slot.leave(PLACE, "orders", 0, b"rows")
    [head] = leading.left(PLACE)
    assert leading.take(head, "orders") == (b"rows", False)
    assert leading.take(head, "orders") == (b"rows", True)
    leading.answer(head, b"done", True)
    assert slot.answer() == (b"done", True)
    assert leading.take(head, "orders") is None, "it was answered"


def test_an_answer_says_that_another_has_taken_the_letter_since(path: Path, both: tuple[Slots, Slots]) -> None:
    """Two clients of one process may have a turn at once: what one refuses the other may still do."""
    waiting, leading = both
    file = opened(path)
    too = Slots(file, os.urandom)
    slot = lent(waiting)
    slot.leave(PLACE, "orders", 0, b"rows")
    [head] = leading.left(PLACE)
    assert leading.take(head, "orders") == (b"rows", False)
    assert too.take(head, "orders") == (b"rows", True)
    leading.answer(head, b"refused", False)
    assert slot.answer() == (b"refused", True)
    too.close()
    os.close(file)


def test_where_the_file_was_cut_nobody_knows_that_a_letter_was_not_taken(path: Path, both: tuple[Slots, Slots]) -> None:
    waiting, leading = both
    slot = lent(waiting)
    slot.leave(PLACE, "orders", 0, b"rows")
    assert leading.take(leading.left(PLACE)[0], "orders") is not None
    os.truncate(path, 0)
    assert slot.withdraw() is True


def test_an_answer_that_comes_late_is_no_answer_to_the_next_letter(both: tuple[Slots, Slots]) -> None:
    """Nor does it hide that the next one was taken."""
    _, leading = both
    slot, late = left_again(*both)
    leading.answer(late, b"late", False)
    assert slot.answer() is None
    assert slot.withdraw() is True


def test_a_late_answer_hides_no_taking_even_where_its_writer_was_stopped_as_it_wrote(both: tuple[Slots, Slots]) -> None:
    _, leading = both
    slot, late = left_again(*both)
    leading._tell(late, late.number, False, 0)  # it had looked whether a later letter was taken before this one was
    assert slot.answer() is None
    assert slot.withdraw() is True


def test_what_is_written_in_part_counts_as_not_there(path: Path, both: tuple[Slots, Slots]) -> None:
    waiting, leading = both
    slot = lent(waiting)
    slot.leave(PLACE, "orders", 0, b"rows and rows")
    [head] = leading.left(PLACE)
    whole = path.read_bytes()
    at = whole.index(b"rows and rows")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"torn")
    assert leading.take(head, "orders") is None
    begin = head.slot * 64 + 20
    path.write_bytes(whole[:begin] + b"torn" + whole[begin + 4 :])
    assert leading.left(PLACE) == [], "nor does a head"
    path.write_bytes(os.urandom(len(whole)))
    assert leading.left(PLACE) == []
    assert slot.answer() is None


def test_slots_are_bounded_and_nobody_has_that_of_another(path: Path) -> None:
    files = [opened(path) for _ in range(SLOTS // OWN_MAX + 1)]
    stores = [Slots(file, os.urandom) for file in files]
    found = [slots.borrow() for slots in stores for _ in range(OWN_MAX + 1)]
    had = [slot for slot in found if slot is not None]
    assert len({slot._index for slot in had}) == len(had) == SLOTS
    stores[0].give_back(had[0])
    assert stores[0].borrow() is had[0]
    for slots, file in zip(stores, files, strict=True):
        slots.close()
        os.close(file)


def test_what_an_ended_process_left_is_overwritten_and_that_of_a_living_one_is_not(path: Path) -> None:
    ended, living = opened(path), opened(path)
    one, two = Slots(ended, os.urandom), Slots(living, os.urandom)
    lost, kept = lent(one), lent(two)
    lost.leave(PLACE, "orders", 0, b"rows of the dead")
    kept.leave(PLACE, "orders", 0, b"rows of the living")
    one.close()
    os.close(ended)
    two.wipe()
    assert b"rows of the dead" not in path.read_bytes()
    assert [head.slot for head in two.left(PLACE)] == [kept._index]
    two.close()
    os.close(living)


def test_what_an_ended_process_left_is_not_taken(path: Path) -> None:
    """It may have been killed long ago, and its rows were not there since."""
    ended, leading = opened(path), opened(path)
    one, two = Slots(ended, os.urandom), Slots(leading, os.urandom)
    lent(one).leave(PLACE, "orders", 0, b"rows of the dead")
    own = lent(two)
    own.leave(PLACE, "orders", 0, b"own rows")
    one.close()
    os.close(ended)
    assert [head.slot for head in two.left(PLACE)] == [own._index]
    two.close()
    os.close(leading)


def test_only_a_file_of_this_user_alone_has_letters(path: Path) -> None:
    file = opened(path)
    assert are_possible(file)
    path.chmod(0o660)
    assert not are_possible(file)
    os.close(file)


def waited(turns: LetterTurns, wait_s: float = WAIT_S, data: bytes | None = b"rows") -> Had:
    with turns.turn_or_answer("orders", wait_s, Letter(lambda: data)) as had:
        return had


@contextlib.contextmanager
def waiting_for(turns: LetterTurns, found: list[Had]) -> Iterator[None]:
    """Another thread waits meanwhile; how it had its turn is in `found` afterwards."""
    thread = threading.Thread(target=lambda: found.append(waited(turns)))
    thread.start()
    yield
    thread.join(WAIT_S)


def test_a_letter_is_answered_by_who_has_the_turn(path: Path) -> None:
    turns = LetterTurns(str(path))
    found: list[Had] = []
    with held(path) as holder, waiting_for(turns, found):
        while told(holder, "answer") == 0:
            pass
    assert (found[0].turn, found[0].answer, found[0].is_doubtful) == (Turn.NONE, b"ROWS", False)
    turns.close()


def test_who_is_killed_with_a_letter_leaves_its_sender_the_turn_and_a_doubt(path: Path) -> None:
    turns = LetterTurns(str(path))
    found: list[Had] = []
    with held(path) as holder, waiting_for(turns, found):
        while told(holder, "take") == 0:
            pass
        holder.kill()
    assert (found[0].turn, found[0].answer, found[0].is_doubtful) == (Turn.WAITED, None, True)
    turns.close()


def test_those_who_waited_for_a_stopped_process_take_turns_among_themselves(path: Path) -> None:
    now = [0.0]
    turns = LetterTurns(str(path), monotonic=lambda: now[0])
    with held(path) as holder:
        os.kill(holder.pid, signal.SIGSTOP)

        def data() -> bytes:
            now[0] += 0.01
            return b"rows"

        with turns.turn_or_answer("orders", 0, Letter(data)) as had:
            assert had.turn is Turn.NONE, "it was not to wait"
        turns._distrusted_until = DISTRUST_S  # as once it has waited in vain
        with turns.turn_or_answer("orders", WAIT_S, Letter(data)) as had:
            assert had.turn is Turn.WAITED, "of another place"
            letters = had.letters(10)
        assert letters == []
        holder.kill()
        holder.wait(WAIT_S)
        with turns.turn_or_answer("orders", WAIT_S, Letter(data)) as had:
            assert had.turn is Turn.AT_ONCE, "of its own place again"
    turns.close()


def test_who_waits_in_vain_goes_on_without(path: Path) -> None:
    turns = LetterTurns(str(path))
    with held(path):
        had = waited(turns, 0.01)
    assert (had.turn, had.answer, had.is_doubtful) == (Turn.NONE, None, False)
    turns.close()


def test_a_letter_that_is_too_long_is_not_left(path: Path) -> None:
    turns = LetterTurns(str(path))
    with held(path):
        had = waited(turns, 0.01, bytes(LETTER_BYTES_MAX + 1))
        assert had.turn is Turn.NONE
        assert waited(LetterTurns(str(path)), 0.01, None).turn is Turn.NONE
    assert path.stat().st_size == 0
    turns.close()


def test_a_turn_ends_although_the_file_was_closed_meanwhile(path: Path) -> None:
    turns = LetterTurns(str(path))
    with turns.turn_or_answer("orders", 0, Letter(lambda: None)) as had:
        turns.close()
        assert had.letters(1) == []
        assert turns._letter_file is not None, "its number must not become another file's"
    assert turns._letter_file is None
    assert waited(turns).turn is Turn.AT_ONCE


def test_an_erasure_overwrites_letters(tmp_path: Path) -> None:
    store = SqliteConsensus(str(tmp_path / "log.db"))
    store.compare_and_set("orders", 1, b"x")
    path = tmp_path / "log.db-turns"
    ended = opened(path)
    slots = Slots(ended, os.urandom)
    lent(slots).leave(PLACE, "orders", 0, b"rows of the dead")
    slots.close()
    os.close(ended)
    assert store.scrub() == ""
    assert b"rows of the dead" not in path.read_bytes()
    store.close()


def test_locks_of_slots_are_of_an_open_file(path: Path) -> None:
    """So a process that opens a directory twice has two of them, and closing one leaves the other its slots."""
    files = [opened(path) for _ in range(3)]
    one, two, three = (Slots(file, os.urandom) for file in files)
    first, second = lent(one), lent(two)
    assert first._index != second._index
    one.close()
    os.close(files[0])
    assert second._index not in {lent(three)._index for _ in range(OWN_MAX)}
    for slots, file in zip((two, three), files[1:], strict=True):
        slots.close()
        os.close(file)
