"""What one Python process of Spark keeps open, and what it lets go."""

from __future__ import annotations

import threading
from pathlib import Path

from persist.client.connect import Connection
from persist.spark.executors import TRANSPORTS_MAX, transport


def test_a_location_that_was_not_used_for_long_is_closed(tmp_path: Path) -> None:
    """Its threads went on, and asked its log for news 200 times a second, for as long as the process lived."""
    before = threading.active_count()
    transport(Connection(f"persist://{tmp_path}/first"))
    of_one = threading.active_count() - before
    assert of_one > 0
    for number in range(3 * TRANSPORTS_MAX):
        transport(Connection(f"persist://{tmp_path}/{number}"))
    assert threading.active_count() - before <= TRANSPORTS_MAX * of_one


def test_a_location_that_is_still_held_stays_open(tmp_path: Path) -> None:
    held = transport(Connection(f"persist://{tmp_path}/held"))
    for number in range(3 * TRANSPORTS_MAX):
        transport(Connection(f"persist://{tmp_path}/{number}"))
    assert list(held.names("", "", 10)) == []
