"""Options and fixtures that every test may use. Fixtures of stores and servers live beside their tests."""

from __future__ import annotations

import os
import random
import sys

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.services.plugin"]

# Spark starts its Python workers with these; without them it takes whatever `python3` the machine has.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)

# No test asserts on time: a busy machine must not turn a true property into a failure.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="rewrite the expected output of tests/scripts/**/*.txt; read the diff before you commit it",
    )


class SeededIds:
    """An `IdSource` whose ids follow from its seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def uuid7(self) -> str:
        return f"{self._random.getrandbits(128):032x}"


@pytest.fixture
def ids() -> SeededIds:
    """Fresh ids, the same ones in every run."""
    return SeededIds()
