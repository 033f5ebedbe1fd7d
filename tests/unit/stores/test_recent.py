"""What a process has just put is known for a minute, unless it deletes it again."""

from __future__ import annotations

from blob.cache import RECENT_MAX, RECENT_S, RecentPuts
from blob.memory_blobs import MemoryBlob


def test_a_put_is_known_for_a_minute() -> None:
    now = [100.0]
    recent = RecentPuts(lambda: now[0])
    assert recent.size("a") is None
    recent.add("a", 0)
    assert recent.size("a") == 0
    now[0] += RECENT_S - 1
    recent.add("b", 3)
    assert (recent.size("a"), recent.size("b")) == (0, 3)
    now[0] += 1
    assert (recent.size("a"), recent.size("b")) == (None, 3)


def test_what_is_deleted_is_not_known() -> None:
    recent = RecentPuts(lambda: 0.0)
    recent.add("a", 1)
    recent.forget(["a", "never put"])
    assert recent.size("a") is None


def test_the_oldest_makes_room() -> None:
    recent = RecentPuts(lambda: 0.0)
    for number in range(RECENT_MAX + 1):
        recent.add(str(number), number)
    assert recent.size("0") is None
    assert recent.size(str(RECENT_MAX)) == RECENT_MAX


def test_a_store_that_is_near_remembers_nothing() -> None:
    blob = MemoryBlob("mem:")
    blob.put("a", b"a")
    assert blob.put_here("a") is None
