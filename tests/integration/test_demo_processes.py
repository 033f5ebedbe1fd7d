"""The demo's child processes end with it, say why they failed, and its server comes back after kill -9."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from examples.flights.processes import Child, Children, Deadline, DemoFailed, Server
from examples.flights.store import environment_of, free_name, look
from persist.cli.where import Where
from tests.support.waiting import WAIT_S


def children_in(directory: Path) -> Children:
    return Children(environment_of(Where(directory=str(directory / "shards")), os.environ), directory)


def test_a_child_that_fails_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    with children_in(tmp_path) as children:
        with pytest.raises(DemoFailed, match=r"the listener ended before it was done(.|\n)*No module named"):
            children.start("listener", "no_such_module").event(WAIT_S)
        with pytest.raises(DemoFailed, match="ended with exit code 1"):
            children.run("writer", "no_such_module", timeout_s=WAIT_S)


def test_children_are_stopped_when_the_demo_fails(tmp_path: Path) -> None:
    started: list[Child] = []

    def fails() -> None:
        with children_in(tmp_path) as children:
            started.append(children.start("server", "http.server", "--bind", "127.0.0.1", "0"))
            raise DemoFailed("on purpose")

    with pytest.raises(DemoFailed, match="on purpose"):
        fails()
    [child] = started
    assert child.process.returncode is not None


def test_a_wait_ends_with_the_demo() -> None:
    assert Deadline(100).left(5) == 5
    with pytest.raises(DemoFailed, match="--timeout"):
        Deadline(0).left(5)


def test_a_killed_server_comes_back_at_its_port_with_all_that_it_acknowledged(tmp_path: Path) -> None:
    with children_in(tmp_path) as children:
        server = Server(children, WAIT_S)
        url = server.url
        with persist.connect(url) as client:
            shard = client.create_shard("flights", pa.schema([pa.field("k", pa.int64(), nullable=False)]), ["k"])
            shard.compare_and_append(pa.table({"k": [1, 2]}), 0, 5)
            server.kill()
            server.start(WAIT_S)
            assert server.url == url
            assert shard.snapshot(4).to_arrow()["k"].to_pylist() == [1, 2]
            shard.close()
        location = Where(directory=str(tmp_path / "shards")).open(must_exist=True)
        assert look(location, "flights").updates == 2
        assert free_name(location, "flights") == "flights-2"
        assert free_name(location, "trains") == "trains"
        location.close()
