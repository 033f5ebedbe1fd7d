"""Spill files: which ones a new one takes in, their bytes, and what a lookup, a page and a flush ask of the store."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import pytest

from blob.memory_blobs import MemoryBlob
from persist.attributes.node_store import NodeCache
from persist.commit import spill_files
from persist.commit.spill_files import SpillReader, SpillWriter
from persist.core import commands as c
from persist.core.audit_log import CommandEntry, Committed, TokenOutcome
from persist.core.errors import Corruption, UpgradeNeeded
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo, Token, token_of_key, writer_of
from persist.core.record import replace
from persist.core.shard_settings import ShardSettings
from persist.core.spill import ENTRIES, FILE_BYTES_MAX, OUTCOMES, SpillFile, SpillKind, files_to_merge
from persist.core.state import Policy, State
from persist.core.transitions import Context, step
from persist.formats.spill_frames import LAYOUTS, RunIndex, decode_run, encode_run
from tests.support.location import memory_location
from tests.support.shard import Shard

EACH = 40  # entries, or outcomes, of a file
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
KEEPING = ShardSettings(7 * DAY_MS, 1_000, 1)
EAGER = Policy(overlay_flush_at=2)


# --- which files a new one takes in


def file(count: int, size: int = 1, begun_ms: int = 0) -> SpillFile:
    return SpillFile(f"{count}", size, 0, count, 0, 0, begun_ms=begun_ms)


@pytest.mark.parametrize(("counts", "taken"), [
    ([], []), ([100], [100]), ([400], []), ([399], [399]), ([1_000, 300, 100], [1_000, 300, 100]),
    ([100_000, 300, 100], [300, 100]),
])  # fmt: skip
def test_a_new_file_takes_in_those_that_are_not_much_larger(counts: list[int], taken: list[int]) -> None:
    files = tuple(file(count) for count in counts)
    assert [found.count for found in files_to_merge(files, 100, 0, DAY_MS)] == taken


def test_a_new_file_takes_in_no_more_than_so_many_bytes() -> None:
    files = (file(100, FILE_BYTES_MAX // 2), file(50, FILE_BYTES_MAX // 2), file(10, 1))
    assert files_to_merge(files, 100, 0, None) == files[1:]


def test_a_new_file_takes_in_none_that_is_old_and_would_be_kept_longer_by_it() -> None:
    files = (file(1, begun_ms=1), file(1, begun_ms=5 * HOUR_MS))
    assert files_to_merge(files, 100, 5 * HOUR_MS, DAY_MS) == files[1:]
    assert files_to_merge(files, 100, 5 * HOUR_MS, None) == files


# --- bytes

DIGESTS = (b"", b"retired", b"d" * 16, b"d" * 15 + b"\0")
LAYOUT = LAYOUTS[OUTCOMES]
IDS = [f"{number:016x}{number * 0x123456789ABCD00 % (1 << 64):016x}" for number in range(1, 256)]
PAIRS = sorted(
    LAYOUT.pair(key, TokenOutcome(Antichain(number), Antichain(None), DIGESTS[number % 4], number))
    for number, key in enumerate(IDS)
)
BYTES, INDEX_AT = encode_run(PAIRS, LAYOUT)


def test_the_bytes_of_a_file_tell_every_outcome_and_no_other() -> None:
    assert list(decode_run(BYTES, LAYOUT, INDEX_AT)) == PAIRS
    index = RunIndex(BYTES[INDEX_AT:], LAYOUT, INDEX_AT)
    assert len(index) > 2
    for key, value in PAIRS:
        number = index.block_of(key)
        start, length = index.place(number)
        assert index.may_hold(key)
        assert dict(index.pairs(number, BYTES[start : start + length]))[key] == value
    assert not index.may_hold(b"\xfe" * 16)
    assert index.block_of(b"\0" * 16) == -1


def test_damage_is_corruption_and_a_newer_version_asks_for_an_upgrade() -> None:
    for at in range(len(BYTES)):
        damaged = BYTES[:at] + bytes([BYTES[at] ^ 1]) + BYTES[at + 1 :]
        with pytest.raises((Corruption, UpgradeNeeded)):
            list(decode_run(damaged, LAYOUT, INDEX_AT))
    for cut in (0, 10, INDEX_AT, len(BYTES) - 1):
        with pytest.raises(Corruption):
            list(decode_run(BYTES[:cut], LAYOUT, INDEX_AT))
    with pytest.raises(Corruption):
        list(decode_run(BYTES, LAYOUT, INDEX_AT - 1))


def test_a_block_in_the_place_of_another_is_corruption() -> None:
    index = RunIndex(BYTES[INDEX_AT:], LAYOUT, INDEX_AT)
    start, length = index.place(1)
    with pytest.raises(Corruption, match="does not begin with the key"):
        index.pairs(0, BYTES[start : start + length])
    with pytest.raises(Corruption):
        index.pairs(0, zlib.compress(b"x"))


# --- what it costs


class CountingBlob(MemoryBlob):
    reads = 0
    bytes_read = 0

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads += 1
        self.bytes_read += length
        return super().get_range(key, start, length)


class Files:
    """A State whose entries and outcomes go to files, as often as they are asked to."""

    def __init__(self) -> None:
        self.blob = CountingBlob("mem:")
        self.location = memory_location(blob=self.blob)
        self.state: State = replace(Shard().state, settings=KEEPING)
        self.restart()

    def restart(self) -> None:
        """Another process goes on."""
        cache = NodeCache()
        self.writer = SpillWriter(self.location.versions, self.location.ids, cache)
        self.reader = SpillReader(self.blob, cache)

    def flush(self, kind: SpillKind = ENTRIES) -> c.Flush:
        command = self.writer.flush(self.state, kind, EAGER)
        assert command is not None
        self.state, result = step(self.state, command, Context(5, EAGER, checked_ms=9))
        assert result == c.Flushed(True)
        return command

    def flush_entries(self) -> c.Flush:
        first = self.state.seqno + 1
        entries = {SeqNo(number): committed(number) for number in range(first, first + EACH)}
        self.state = replace(self.state, seqno=SeqNo(first + EACH - 1), entries=entries)
        return self.flush()

    def flush_tokens(self, tokens: Iterable[Token]) -> c.Flush:
        outcomes = {token[1:]: TokenOutcome(Antichain(0), Antichain(1), b"d" * 16, 0) for token in tokens}
        self.state = replace(self.state, outcomes=outcomes)
        return self.flush(OUTCOMES)

    def told(self) -> list[int]:
        page = self.reader.page(self.state, None, 1_000, maintenance=True)
        return [int(entry.place.seqno) for entry in page.entries]

    def knows(self, token: Token) -> bool:
        command = c.UpdateAttributes(writer_of(token), token, ())
        return token[1:] in self.reader.remembered(self.state, [command])


def committed(number: int) -> Committed:
    return Committed(number, (CommandEntry("insert", Antichain(number), Antichain(number + 1)),))


def free_form() -> Iterator[Token]:
    number = 0
    while True:
        yield token_of_key(f"token {number}")
        number += 1


def test_files_that_this_process_wrote_are_merged_without_a_read() -> None:
    files = Files()
    merged = [len(files.flush_entries().merged) for _ in range(8)]
    assert sum(merged) > 4
    assert files.blob.reads == 0
    assert files.told() == list(range(8 * EACH + 1, 1, -1))
    assert files.blob.reads > 0, "whoever asks for the history is told what is in the store"


def test_files_of_another_process_are_read() -> None:
    files = Files()
    files.flush_entries()
    files.restart()
    assert len(files.flush_entries().merged) == 1
    assert files.blob.reads == 1
    assert files.told() == list(range(2 * EACH + 1, 1, -1))


def test_a_large_file_is_not_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_files, "CACHED_BYTES_MAX", 10)
    files = Files()
    files.flush_entries()
    files.flush_entries()
    assert files.blob.reads == 1


def test_a_file_that_cannot_be_read_is_left_as_it_is() -> None:
    files = Files()
    [gone] = [files.flush_entries().file]
    files.blob.delete([gone.key])
    files.restart()
    assert files.flush_entries().merged == ()
    assert len(files.state.files_of(ENTRIES)) == 2


def test_a_lookup_reads_one_block_and_one_that_finds_nothing_reads_none() -> None:
    files, tokens = Files(), free_form()
    known = [next(tokens) for _ in range(2_000)]
    [file] = [files.flush_tokens(known).file]
    assert files.knows(known[0]), "the index is read once"
    for token in known[:50]:
        before = files.blob.reads, files.blob.bytes_read
        assert files.knows(token)
        assert files.blob.reads == before[0] + 1
        assert files.blob.bytes_read - before[1] < file.size / 20
    before = files.blob.reads, files.blob.bytes_read
    assert not any(files.knows(next(tokens)) for _ in range(50))
    assert (files.blob.reads, files.blob.bytes_read) == before


def test_a_file_whose_tokens_were_born_at_other_times_is_not_asked() -> None:
    files = Files()
    files.flush_tokens(Token(f"i{born:012x}7{born:019x}") for born in range(100, 200))
    assert not files.knows(Token(f"i{99:012x}7{99:019x}"))
    assert not files.knows(token_of_key("free-form"))
    assert files.blob.reads == 0
    assert files.knows(Token(f"i{199:012x}7{199:019x}"))


# --- the move


def test_both_kinds_are_dated_by_their_own_clocks_and_keep_to_themselves() -> None:
    files = Files()
    files.flush_entries()
    files.flush_tokens([token_of_key("a")])
    [entries], [outcomes] = files.state.files_of(ENTRIES), files.state.files_of(OUTCOMES)
    assert (entries.begun_ms, entries.until_ms, entries.unnumbered) == (9, 9, False)
    assert (outcomes.begun_ms, outcomes.until_ms, outcomes.unnumbered) == (5, 5, True)


def flush_of(state: State, *seqnos: int, number: int = 1) -> c.Flush:
    key = f"{state.shard_id}/s/x{number:032x}.spill"
    return c.Flush(ENTRIES, (), seqnos, SpillFile(key, 9, 1, len(seqnos), min(seqnos), max(seqnos)))


def test_entries_move_in_order_and_only_if_all_are_there() -> None:
    state = replace(Shard().state, settings=KEEPING, entries={SeqNo(n): committed(n) for n in range(1, 5)})
    context = Context(0, EAGER)
    for refused in (flush_of(state, 2, 3), flush_of(state, 1, 3), flush_of(state, 1, 2, 9)):
        assert step(state, refused, context) == (state, c.Flushed(False))
    moved, result = step(state, flush_of(state, 1, 2), context)
    assert result == c.Flushed(True)
    assert sorted(moved.entries) == [3, 4]
    assert step(moved, flush_of(state, 1, 2), context) == (moved, c.Flushed(True)), "a retry"
    assert step(moved, flush_of(state, 1, 2, number=2), context) == (moved, c.Flushed(False))
    without = replace(state, settings=ShardSettings())
    assert step(without, flush_of(state, 1, 2), context) == (without, c.Flushed(False)), "its history is not kept"
