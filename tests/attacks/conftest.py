"""One server for all attacks with low limits: each must leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks import harness


@pytest.fixture(scope="package")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.House]:
    with harness.house(tmp_path_factory.mktemp("attacked")) as house:
        yield house


@pytest.fixture
def house(attacked: harness.House) -> harness.House:
    assert attacked.is_alive, "an attack before this one has ended the server"
    return attacked
