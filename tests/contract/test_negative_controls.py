"""Broken providers, each of which the contract suite must catch. A suite that cannot fail proves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from blob import Blob, BlobNotFound, BlobStat
from blob.memory_blobs import MemoryBlob
from consensus import Consensus, Entry
from consensus.interface import Wanted
from consensus.memory_logs import MemoryConsensus
from tests.contract import test_blob as blobs
from tests.contract import test_consensus as logs
from tests.contract.consensus_providers import Place
from tests.contract.racing import Win, judge, race_threads, read_log


class LooksThenLeaps(MemoryConsensus):
    """Asks for the head and writes in two steps: the classic lost update."""

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        head = self.head(key)
        if (head.seqno if head else 0) != seqno - 1:
            return False
        time.sleep(0.001)
        self._logs.setdefault(key, {})[seqno] = data
        self._heads[key] = seqno
        return True


class LeavesGaps(MemoryConsensus):
    """Accepts any seqno beyond the head."""

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        if self._heads.get(key, 0) >= seqno:
            return False
        self._logs.setdefault(key, {})[seqno] = data
        self._heads[key] = seqno
        return True


class ForgetsNowAndThen(MemoryConsensus):
    """Acknowledges every seventh write and keeps another value."""

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        return super().compare_and_set(key, seqno, b"forgotten" if seqno % 7 == 0 else data)


class TruncatesTheHead(MemoryConsensus):
    def truncate(self, key: str, seqno: int) -> int:
        deleted = super().truncate(key, seqno)
        if seqno == self._heads[key]:
            del self._logs[key][seqno], self._heads[key]
        return deleted


class TruncatesBeforeItLooks(MemoryConsensus):
    def truncate(self, key: str, seqno: int) -> int:
        log = self._logs.get(key, {})
        head = self._heads.get(key, 0)
        for live in [live for live in log if live < min(seqno, head)]:
            del log[live]
        return super().truncate(key, seqno)


class ScansDescending(MemoryConsensus):
    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        return super().scan(key, from_seqno, limit)[::-1]


class ListsKeysAsTheyCame(MemoryConsensus):
    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        return [key for key in self._heads if key.startswith(prefix) and key > after][:limit]


class TellsNobody(MemoryConsensus):
    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        return lambda: None


BROKEN_LOGS: list[tuple[type[MemoryConsensus], Callable[[Consensus], None]]] = [
    (LooksThenLeaps, logs.test_sixteen_threads_racing_on_one_key),
    (LeavesGaps, lambda store: logs.test_a_wrong_seqno_loses_and_changes_nothing(store, 4)),
    (LeavesGaps, logs.test_an_empty_key_takes_only_seqno_one),
    (ForgetsNowAndThen, logs.test_sixteen_threads_racing_on_one_key),
    (TruncatesTheHead, logs.test_truncation_deletes_what_is_before_and_keeps_the_head),
    (TruncatesTheHead, logs.test_a_truncated_seqno_cannot_be_won_again),
    (TruncatesBeforeItLooks, logs.test_truncation_beyond_the_head_is_refused_and_deletes_nothing),
    (ScansDescending, logs.test_a_scan_starts_where_told_and_stops_at_its_limit),
    (ListsKeysAsTheyCame, logs.test_keys_are_listed_in_byte_order_page_by_page),
    (
        TellsNobody,
        lambda store: logs.test_subscribers_hear_of_their_own_and_of_others_commits(Place(lambda: store, None)),
    ),
]


@pytest.mark.parametrize(("broken", "check"), BROKEN_LOGS)
def test_the_suite_catches_a_broken_consensus_store(
    broken: type[MemoryConsensus], check: Callable[[Consensus], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(MemoryConsensus())
    monkeypatch.setattr(logs, "_drain", _drain_at_once)
    with pytest.raises((AssertionError, KeyError)):
        check(broken())


def _drain_at_once(heard: object) -> set[str]:
    return set(iter(heard.get_nowait, None)) if not heard.empty() else set()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("wins", "log", "complaint"), [
    ([(1, b"a"), (1, b"b")], [(1, b"b")], "several winners"),
    ([(1, b"a"), (3, b"b")], [(1, b"a"), (3, b"b")], "gap"),
    ([(1, b"a"), (2, b"b")], [(1, b"a")], "not those that were won"),
    ([(1, b"a")], [(1, b"a"), (2, b"phantom")], "not those that were won"),
    ([(1, b"a"), (2, b"b")], [(1, b"a"), (2, b"x")], "lost"),
])  # fmt: skip
def test_the_judge_of_races_complains(
    wins: list[tuple[int, bytes]], log: list[tuple[int, bytes]], complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        judge([Win(seqno, number, data) for number, (seqno, data) in enumerate(wins)], log)


def test_the_judge_is_content_with_a_true_store() -> None:
    store = MemoryConsensus()
    judge(race_threads(store, writers=4, wins_each=5), read_log(store))


class Overwrites(MemoryBlob):
    def put(self, key: str, data: bytes | memoryview) -> None:
        self.delete([key])
        super().put(key, data)


class RefusesRetries(MemoryBlob):
    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.stat(key) is not None:
            raise KeyError(key)
        super().put(key, data)


class CutsRangesShort(MemoryBlob):
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]


class ListsOnePageOnly(MemoryBlob):
    def list(self, prefix: str) -> Iterator[BlobStat]:
        return iter(list(super().list(prefix))[:1000])


class ListsByDirectory(MemoryBlob):
    """Matches whole segments of the prefix instead of its characters."""

    def list(self, prefix: str) -> Iterator[BlobStat]:
        return (found for found in super().list(prefix) if not prefix or found.key.startswith(prefix.rstrip("/") + "/"))


class ListsAsTheyCame(MemoryBlob):
    def list(self, prefix: str) -> Iterator[BlobStat]:
        return iter(sorted(super().list(prefix), key=lambda found: found.size))


class DeletesTheFirstThousand(MemoryBlob):
    def delete(self, keys: Sequence[str]) -> None:
        super().delete(keys[:1000])


class ComplainsOfTheMissing(MemoryBlob):
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self.stat(key) is None:
                raise BlobNotFound(key)
            super().delete([key])


class RemembersTheDeleted(MemoryBlob):
    def delete(self, keys: Sequence[str]) -> None:
        """Does nothing."""


BROKEN_BLOBS: list[tuple[type[MemoryBlob], Callable[[Blob], None]]] = [
    (Overwrites, blobs.test_a_key_is_written_once),
    (RefusesRetries, blobs.test_a_retried_put_is_fine),
    (CutsRangesShort, blobs.test_a_range_past_the_end_is_never_cut_short),
    (ListsOnePageOnly, blobs.test_more_deletes_and_keys_than_one_request_takes),
    (ListsByDirectory, blobs.test_a_listing_is_by_prefix_in_key_order),
    (ListsAsTheyCame, blobs.test_a_listing_is_by_prefix_in_key_order),
    (DeletesTheFirstThousand, blobs.test_more_deletes_and_keys_than_one_request_takes),
    (ComplainsOfTheMissing, blobs.test_delete_takes_any_number_and_misses_nothing),
    (RemembersTheDeleted, blobs.test_delete_takes_any_number_and_misses_nothing),
]


@pytest.mark.parametrize(("broken", "check"), BROKEN_BLOBS)
def test_the_suite_catches_a_broken_blob_store(broken: type[MemoryBlob], check: Callable[[Blob], None]) -> None:
    check(MemoryBlob())
    with pytest.raises((AssertionError, KeyError, BlobNotFound, pytest.fail.Exception)):
        check(broken())
