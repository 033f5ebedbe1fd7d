"""What every consensus store promises, on every provider."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from consensus import ENDED, HIDDEN, Consensus, ConsensusUsage, Entry, open_consensus
from tests.contract.consensus_providers import SERVERS_IN_PROOF, Place
from tests.contract.racing import judge, race_processes, race_threads, read_log
from tests.support.waiting import WAIT_S


def fill(consensus: Consensus, key: str, length: int) -> list[Entry]:
    entries = [Entry(seqno, f"value {seqno}".encode()) for seqno in range(1, length + 1)]
    for entry in entries:
        assert consensus.compare_and_set(key, entry.seqno, entry.data)
    return entries


def test_an_unknown_key_is_empty(consensus: Consensus) -> None:
    assert consensus.head("nothing") is None
    assert consensus.scan("nothing", 0, 10) == []
    assert consensus.keys() == []


def test_a_log_grows_by_one_from_one(consensus: Consensus) -> None:
    entries = fill(consensus, "k", 5)
    assert consensus.head("k") == entries[-1]
    assert consensus.scan("k", 0, 100) == entries


@pytest.mark.parametrize("seqno", [1, 2, 4, 5, 100])
def test_a_wrong_seqno_loses_and_changes_nothing(consensus: Consensus, seqno: int) -> None:
    entries = fill(consensus, "k", 2)
    assert not consensus.compare_and_set("k", seqno, b"late")
    assert consensus.scan("k", 0, 100) == entries


def test_an_empty_key_takes_only_seqno_one(consensus: Consensus) -> None:
    assert not consensus.compare_and_set("k", 2, b"early")
    assert consensus.head("k") is None
    assert consensus.keys() == []
    assert consensus.compare_and_set("k", 1, b"first")


@pytest.mark.parametrize("data", [b"", b"\0", b"\xff\x00\x01" * 1000], ids=["empty", "zero", "binary"])
def test_any_bytes_come_back(consensus: Consensus, data: bytes) -> None:
    assert consensus.compare_and_set("k", 1, data)
    assert consensus.head("k") == Entry(1, data)


def test_keys_are_independent(consensus: Consensus) -> None:
    first = fill(consensus, "a", 3)
    second = fill(consensus, "a/b", 2)
    third = fill(consensus, "a0", 1)
    assert consensus.scan("a", 0, 10) == first
    assert consensus.scan("a/b", 0, 10) == second
    assert consensus.scan("a0", 0, 10) == third
    assert consensus.truncate("a", 3) == 2
    assert consensus.scan("a/b", 0, 10) == second


def test_a_scan_starts_where_told_and_stops_at_its_limit(consensus: Consensus) -> None:
    entries = fill(consensus, "k", 9)
    assert consensus.scan("k", 4, 3) == entries[3:6]
    assert consensus.scan("k", 9, 3) == entries[8:]
    assert consensus.scan("k", 10, 3) == []
    assert consensus.scan("k", 1, 1) == entries[:1]


def test_a_long_log_scans_whole(consensus: Consensus) -> None:
    entries = fill(consensus, "k", 600)
    assert consensus.scan("k", 0, 1000) == entries
    assert consensus.scan("k", 0, 599) == entries[:-1]
    assert consensus.truncate("k", 101) == 100
    assert consensus.scan("k", 0, 400) == entries[100:500]
    assert consensus.scan("k", 50, 1000) == entries[100:]


def test_truncation_deletes_what_is_before_and_keeps_the_head(consensus: Consensus) -> None:
    entries = fill(consensus, "k", 6)
    assert consensus.truncate("k", 4) == 3
    assert consensus.truncate("k", 4) == 0
    assert consensus.truncate("k", 1) == 0
    assert consensus.scan("k", 0, 10) == entries[3:]
    assert consensus.truncate("k", 6) == 2
    assert consensus.head("k") == entries[-1]
    assert consensus.keys() == ["k"]


def test_truncation_beyond_the_head_is_refused_and_deletes_nothing(consensus: Consensus) -> None:
    entries = fill(consensus, "k", 3)
    with pytest.raises(ConsensusUsage, match="head is 3"):
        consensus.truncate("k", 4)
    with pytest.raises(ConsensusUsage, match="head is 0"):
        consensus.truncate("unknown", 1)
    assert consensus.scan("k", 0, 10) == entries


def test_a_truncated_seqno_cannot_be_won_again(consensus: Consensus) -> None:
    fill(consensus, "k", 4)
    consensus.truncate("k", 4)
    for seqno in (1, 2, 3, 4):
        assert not consensus.compare_and_set("k", seqno, b"again")
    assert consensus.compare_and_set("k", 5, b"next")
    assert [entry.seqno for entry in consensus.scan("k", 0, 10)] == [4, 5]


def test_keys_are_listed_in_byte_order_page_by_page(consensus: Consensus) -> None:
    names = ["B", "Z.z", "_", "a", "a-b", "a.b", "a/b", "a0", "b", "shard/1", "shard/10", "shard/2"]
    for name in reversed(names):
        fill(consensus, name, 2)
    assert consensus.keys() == sorted(names)
    assert consensus.keys(prefix="a") == ["a", "a-b", "a.b", "a/b", "a0"]
    assert consensus.keys(prefix="shard/1") == ["shard/1", "shard/10"]
    assert consensus.keys(prefix="nope") == []
    assert consensus.keys(after="a", limit=2) == ["a-b", "a.b"]
    assert consensus.keys(prefix="shard/", after="shard/10") == ["shard/2"]
    assert consensus.keys(prefix="a", after="zzz") == []
    pages, after = [], ""
    while page := consensus.keys(after=after, limit=5):
        pages.append(page)
        after = page[-1]
    assert [len(page) for page in pages] == [5, 5, 2]
    assert [name for page in pages for name in page] == sorted(names)


def test_a_log_that_has_ended_is_left_out_of_full_pages_until_it_goes_on(consensus: Consensus) -> None:
    names = [f"k{number:02}" for number in range(20)]
    for name in names:
        assert consensus.compare_and_set(name, 1, b"begun")
    for name in names[::2]:
        assert consensus.compare_and_set(name, 2, ENDED + name.encode(), b"beg")
    assert consensus.compare_and_set(names[2], 3, ENDED + b", still")
    consensus.truncate(names[2], 3)
    assert consensus.keys(limit=5, with_ended=False) == names[1:10:2], "a page is full while there are more"
    assert consensus.keys(prefix="k1", after="k11", limit=5, with_ended=False) == ["k13", "k15", "k17", "k19"]
    assert consensus.keys(prefix="k00", with_ended=False) == []
    assert consensus.keys() == names
    assert not consensus.compare_and_set(names[0], 2, b"lost"), "what loses changes nothing"
    assert consensus.keys(limit=3, with_ended=False) == names[1:6:2]
    assert consensus.compare_and_set(names[0], 3, b"again", ENDED)
    assert consensus.compare_and_set(names[2], 4, b"again")
    assert consensus.compare_and_set(names[4], 3, b"PSSTD", b"PS")
    assert consensus.keys(limit=5, with_ended=False) == names[:5]


def test_a_head_that_begins_otherwise_is_not_the_one_that_was_meant(consensus: Consensus) -> None:
    assert consensus.compare_and_set("k", 1, b"\x00\xffone, and more")
    assert not consensus.compare_and_set("k", 2, b"two", b"\x00\xffold")
    assert not consensus.compare_and_set("k", 2, b"two", b"\x00\xfe")
    assert not consensus.compare_and_set("k", 2, b"two", b"\x01")
    assert consensus.scan("k", 0, 10) == [Entry(1, b"\x00\xffone, and more")]
    assert consensus.compare_and_set("k", 2, b"\xff\xff\xfftwo", b"\x00\xff")
    assert not consensus.compare_and_set("k", 3, b"three", b"\xff\xff\xff\x00")
    assert not consensus.compare_and_set("k", 2, b"late", b"\x00\xff"), "another has this seqno"
    assert consensus.compare_and_set("k", 3, b"three", b"\xff\xff\xff")
    assert [entry.seqno for entry in consensus.scan("k", 0, 10)] == [1, 2, 3]


def test_a_hidden_key_has_a_log_and_is_never_listed(consensus: Consensus) -> None:
    fill(consensus, "a", 1)
    entries = fill(consensus, HIDDEN + "binding", 3)
    assert consensus.scan(HIDDEN + "binding", 0, 10) == entries
    assert consensus.head(HIDDEN + "binding") == entries[-1]
    assert consensus.truncate(HIDDEN + "binding", 3) == 2
    fill(consensus, "z", 1)
    assert consensus.keys() == ["a", "z"]
    assert consensus.keys(after="a", limit=1) == ["z"]
    assert consensus.keys(after="z") == []


def test_a_bad_key_is_refused(consensus: Consensus) -> None:
    for key in ("", "with space", "ümlaut", "a\n", "a\0b", "x" * 257):
        for call in (
            lambda key=key: consensus.head(key),
            lambda key=key: consensus.compare_and_set(key, 1, b""),
            lambda key=key: consensus.scan(key, 0, 1),
            lambda key=key: consensus.truncate(key, 1),
        ):
            with pytest.raises(ConsensusUsage):
                call()


def test_the_longest_key_works(consensus: Consensus) -> None:
    key = "k" * 256
    fill(consensus, key, 2)
    assert consensus.keys() == [key]


def test_a_bad_seqno_is_refused(consensus: Consensus) -> None:
    for seqno in (0, -1, 2**63):
        with pytest.raises(ConsensusUsage):
            consensus.compare_and_set("k", seqno, b"")
        with pytest.raises(ConsensusUsage):
            consensus.truncate("k", seqno)


def test_a_bad_limit_is_refused(consensus: Consensus) -> None:
    for limit in (0, -1, 10_001):
        with pytest.raises(ConsensusUsage):
            consensus.scan("k", 0, limit)
        with pytest.raises(ConsensusUsage):
            consensus.keys(limit=limit)


def test_the_longest_value_fits_and_a_longer_one_is_refused_before_it_is_sent(consensus: Consensus) -> None:
    longest = b"x" * consensus.value_bytes_max
    with pytest.raises(ConsensusUsage, match=str(consensus.value_bytes_max)):
        consensus.compare_and_set("k", 1, longest + b"x")
    assert consensus.head("k") is None
    assert consensus.compare_and_set("k", 1, longest)
    head = consensus.head("k")
    assert head is not None
    assert head.data == longest


def test_what_one_store_wrote_another_reads(place: Place) -> None:
    writer, reader = place.open(), place.open()
    entries = fill(writer, "k", 3)
    assert reader.head("k") == entries[-1]
    assert not reader.compare_and_set("k", 3, b"late")
    assert reader.compare_and_set("k", 4, b"mine")
    assert writer.head("k") == Entry(4, b"mine")


def test_it_passes_its_own_check_again_and_again(consensus: Consensus) -> None:
    consensus.check()
    fill(consensus, "k", 1)
    consensus.check()
    assert consensus.keys() == ["k"]


def test_its_url_opens_it_and_tells_no_secret(place: Place) -> None:
    store = place.open()
    assert "right" not in store.url.partition("?")[0].rpartition("/")[0]
    if place.url is not None and "postgresql" not in place.url:
        fill(store, "k", 1)
        again = open_consensus(store.url)
        assert again.head("k") is not None
        again.close()


def test_subscribers_hear_of_their_own_and_of_others_commits(place: Place) -> None:
    mine, other = place.open(), place.open()
    mine.check()
    heard: queue.Queue[str] = queue.Queue()
    unsubscribe = mine.subscribe(heard.put)
    assert unsubscribe is not None, "every provider of this project has a push channel"
    # Hints may be lost, in particular before the channel stands, so both keep committing until both are heard.
    missing, seqno, told = {"mine", "other"}, 0, set[str]()
    while missing and seqno < 500:
        seqno += 1
        assert other.compare_and_set(HIDDEN + "key", seqno, b"")
        assert mine.compare_and_set("mine", seqno, b"")
        assert other.compare_and_set("other", seqno, b"")
        told |= _drain(heard)
        missing -= told
    assert not missing
    assert HIDDEN + "key" not in told
    unsubscribe()
    _drain(heard)
    assert mine.compare_and_set("mine", seqno + 1, b"")
    assert _drain(heard) == set()


def test_a_subscriber_is_not_told_of_what_it_does_not_want(place: Place) -> None:
    store = place.open()
    store.check()
    heard: queue.Queue[str] = queue.Queue()
    asked: list[str] = []

    def wanted(key: str) -> bool:
        asked.append(key)
        return key == "wanted"

    unsubscribe = store.subscribe(heard.put, wanted)
    assert unsubscribe is not None
    assert _first_heard(heard, store, "wanted") == {"wanted"}
    assert "other" in asked
    unsubscribe()


def test_a_key_that_is_followed_is_heard_of_when_another_process_commits_it(place: Place) -> None:
    mine, other = place.open(), place.open()
    mine.check()
    heard: queue.Queue[str] = queue.Queue()
    unsubscribe = mine.subscribe(heard.put, lambda key: key == "followed")
    assert unsubscribe is not None
    unfollow, unfollow_again = mine.follow("followed"), mine.follow("followed")
    unfollow()
    unfollow()
    assert _first_heard(heard, other, "followed") == {"followed"}
    unfollow_again()
    unsubscribe()


def _first_heard(heard: queue.Queue[str], store: Consensus, key: str) -> set[str]:
    """What is heard first, as this key and another one are committed again and again, for a while."""
    found: set[str] = set()
    seqno = 0
    while not found and seqno < 500:
        seqno += 1
        assert store.compare_and_set("other", seqno, b"")
        assert store.compare_and_set(key, seqno, b"")
        found |= _drain(heard)
    return found


def _drain(heard: queue.Queue[str]) -> set[str]:
    found: set[str] = set()
    while True:
        try:
            found.add(heard.get(timeout=0.05))
        except queue.Empty:
            return found


def test_a_subscriber_that_fails_harms_nobody(consensus: Consensus) -> None:
    heard = threading.Event()

    def fails(_key: str) -> None:
        heard.set()
        raise RuntimeError("on purpose")

    unsubscribe = consensus.subscribe(fails)
    assert unsubscribe is not None
    fill(consensus, "k", 3)
    assert heard.wait(WAIT_S)
    fill(consensus, "k2", 3)
    unsubscribe()
    unsubscribe()


def test_a_log_begins_where_it_is_told_and_goes_on_from_there(consensus: Consensus) -> None:
    assert consensus.begin("b", 41, b"41")
    assert consensus.head("b") == Entry(41, b"41")
    assert consensus.scan("b", 0, 10) == consensus.scan("b", 41, 10) == [Entry(41, b"41")]
    assert consensus.scan("b", 42, 10) == []
    assert consensus.keys("b") == ["b"]
    assert not consensus.compare_and_set("b", 1, b"no")
    assert not consensus.compare_and_set("b", 41, b"no")
    assert consensus.compare_and_set("b", 42, b"42", after=b"4")
    assert consensus.truncate("b", 42) == 1
    assert consensus.scan("b", 0, 10) == [Entry(42, b"42")]


def test_a_key_that_has_a_log_cannot_begin_another(consensus: Consensus) -> None:
    fill(consensus, "b", 3)
    consensus.truncate("b", 3)
    for seqno in (1, 2, 3, 4, 100):
        assert not consensus.begin("b", seqno, b"no")
        assert [entry.seqno for entry in consensus.scan("b", 0, 10)] == [3]


def test_a_log_that_begins_as_one_that_has_ended_is_listed_so(consensus: Consensus) -> None:
    assert consensus.begin("b/ended", 7, ENDED + b" by its drop")
    assert consensus.begin("b/live", 7, b"live")
    assert consensus.keys("b/", with_ended=False) == ["b/live"]
    assert consensus.compare_and_set("b/ended", 8, b"the next life", after=ENDED)
    assert consensus.keys("b/", with_ended=False) == ["b/ended", "b/live"]


def test_a_beginning_is_checked_before_anything_is_sent(consensus: Consensus) -> None:
    for seqno in (0, -1, 2**63):
        with pytest.raises(ConsensusUsage):
            consensus.begin("b", seqno, b"")
    with pytest.raises(ConsensusUsage):
        consensus.begin("no key", 5, b"")
    with pytest.raises(ConsensusUsage):
        consensus.begin("b", 5, bytes(consensus.value_bytes_max + 1))
    assert consensus.head("b") is None


def test_of_many_that_begin_one_log_at_different_seqnos_one_wins(place: Place) -> None:
    stores = [place.open() for _ in range(4)]
    for turn in range(8):
        key, gate = f"begun/{turn}", threading.Barrier(8)

        def begin(seqno: int, key: str = key, gate: threading.Barrier = gate) -> bool:
            gate.wait()
            return stores[seqno % 4].begin(key, seqno, str(seqno).encode())

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(begin, range(1, 9)))
        assert won.count(True) == 1
        seqno = won.index(True) + 1
        assert stores[0].scan(key, 0, 10) == [Entry(seqno, str(seqno).encode())]


def test_sixteen_threads_racing_on_one_key(consensus: Consensus) -> None:
    wins = race_threads(consensus, writers=16, wins_each=10)
    judge(wins, read_log(consensus))


# Memory is not shared between processes.
@pytest.mark.parametrize("place", ["sqlite", *SERVERS_IN_PROOF], indirect=True)
def test_four_processes_racing_on_one_key(place: Place) -> None:
    assert place.url is not None
    wins = race_processes(place.url, writers=4, wins_each=20)
    judge(wins, read_log(place.open()))


def test_readers_of_a_log_that_is_truncated_meanwhile_see_no_gap(place: Place) -> None:
    writer, reader = place.open(), place.open()
    fill(writer, "k", 20)
    done = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for seqno in range(21, 221):
                assert writer.compare_and_set("k", seqno, str(seqno).encode())
                if seqno % 10 == 0:
                    writer.truncate("k", seqno - 5)
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        seqnos = [entry.seqno for entry in reader.scan("k", 0, 1000)]
        assert seqnos, "the head is always there"
        assert seqnos == list(range(seqnos[0], seqnos[-1] + 1))
    thread.join()
    assert not failures
