"""A world whose clocks the test moves, a machine of it, and its service in this process. A module may have its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from persist.client.shard import Shard
from rpc.app import create_app
from rpc.settings import ServerSettings
from tests.support.asking import typed
from tests.support.clocks import Machine, World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def machine(world: World) -> Machine:
    return world.machine()


@pytest.fixture
def http(machine: Machine, shard: Shard) -> Iterator[TestClient]:
    """The service over the machine, which has the shard of the module."""
    with typed(TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1")) as client:
        yield client
