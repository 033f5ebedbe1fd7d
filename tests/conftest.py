"""Options and fixtures that every test may use. Fixtures of stores and servers live beside their tests."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from persist.cli.long_running import JsonFormatter
from tests.support.examples import EXAMPLES, EXAMPLES_OF_A_PROOF, SEED_VARIABLE, seed_base

pytest_plugins = ["tests.services.plugin"]

MEMORY = Path("/dev/shm")  # a file system in memory, where no commit of a test waits for an fsync
MEMORY_BYTES_MIN = 6 * 1024**3  # a whole run with its servers takes about half of it

if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN:
    os.environ["TMPDIR"] = str(MEMORY)  # child processes inherit it
    tempfile.tempdir = None  # pytest has asked already
    os.environ.setdefault("SPARK_LOCAL_DIRS", str(MEMORY))

# Spark starts its Python workers with these; without them it takes whatever `python3` the machine has.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="rewrite the expected output of tests/scripts/**/*.txt; read the diff before you commit it",
    )
    parser.addoption("--proof", action="store_true", help="run laws and proofs as a whole, as `make proof` does")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is loaded: `tests.support.examples` asks what is set here."""
    gc.disable()  # until the tests are collected: everything loaded stays, and searching it takes a quarter of the time
    of_a_proof, in_ci = config.getoption("--proof"), os.environ.get("CI") == "true"
    settings.register_profile(
        "persist",
        max_examples=EXAMPLES_OF_A_PROOF if of_a_proof else EXAMPLES,
        deadline=None,  # no test asserts on time: a busy machine must not turn a true property into a failure
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=in_ci,
        print_blob=in_ci,
    )
    settings.load_profile("persist")
    os.environ[SEED_VARIABLE] = str(seed_base())  # the workers of this run have the same


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.getoption("--proof"):
        return []
    return [f"seeds of proofs begin at {seed_base()}; to repeat this run, set {SEED_VARIABLE}={seed_base()}"]


@pytest.fixture(autouse=True)
def no_logs_of_a_command_stay() -> Iterator[None]:
    """A command that runs within a test sends logs to the standard error of just that test."""
    yield
    root = logging.getLogger()
    root.handlers[:] = [one for one in root.handlers if not isinstance(one.formatter, JsonFormatter)]


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


@pytest.fixture(autouse=True, scope="session")
def processes_start_without_pandas() -> None:
    """Processes that tests start have what requirements/server.lock has: pandas takes half of their start."""
    paths = [str(Path(__file__).parent / "support" / "without_pandas"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
