"""What one Python process of Spark keeps open, and what it lets go."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark import TaskContext

from persist.client.connect import Connection
from persist.spark.executors import TRANSPORTS_MAX, transport


def test_a_location_that_was_not_used_for_long_is_closed(tmp_path: Path) -> None:
    """Its threads went on, and asked its log for news 200 times a second, for as long as the process lived."""
    for number in range(TRANSPORTS_MAX):  # what other tests have opened is closed by then
        transport(Connection(f"persist://{tmp_path}/{number}"))
    open_now = threading.active_count()
    for number in range(2 * TRANSPORTS_MAX):
        transport(Connection(f"persist://{tmp_path}/later{number}"))
    assert threading.active_count() <= open_now


@pytest.mark.parametrize(("is_task", "connect_s"), [(False, 5.0), (True, 60.0)])
def test_a_task_waits_longer_for_a_server_than_the_driver_does(
    is_task: bool, connect_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver tells a wrong URL soon. A task knows that the URL is right: its server may be starting again."""
    opened: list[Connection] = []
    monkeypatch.setattr(Connection, "transport", lambda connection: opened.append(connection))
    monkeypatch.setattr(TaskContext, "get", lambda: object() if is_task else None)
    transport(Connection("http://127.0.0.1:1", token=f"is a task: {is_task}"))
    assert [one.connect_s for one in opened] == [connect_s]


def test_a_location_that_is_still_held_stays_open(tmp_path: Path) -> None:
    held = transport(Connection(f"persist://{tmp_path}/held"))
    for number in range(3 * TRANSPORTS_MAX):
        transport(Connection(f"persist://{tmp_path}/{number}"))
    assert list(held.names("", "", 10)) == []
