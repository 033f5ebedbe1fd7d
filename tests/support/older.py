"""Two builds: this code, and this code with one more format version, or the checkout that PERSIST_TEST_PREVIOUS names.

CI has no history of the code. There the newer build is this one that knows a later format version, which it writes as
the current one. Run the same tests with a real older build before a release: `PERSIST_TEST_PREVIOUS=DIR`, where DIR is
a checkout of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from persist.formats.state_frames import THIS_BUILD, Build
from tests.support.forked import Forked
from tests.support.server import Process

PREVIOUS = "PERSIST_TEST_PREVIOUS"
OLD = THIS_BUILD.newest
NEXT = Build((*THIS_BUILD.formats, OLD + 1))


def know_next_format() -> None:
    """From here on this process is of a build that knows one version more: all of its code asks this one record."""
    object.__setattr__(THIS_BUILD, "formats", NEXT.formats)


def newer(words: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Start `persist WORDS` by the newer build."""
    return Forked(words, environment, before=know_next_format)


class Checkout:
    """`persist WORDS` by the code of another checkout, with the libraries of this one."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        directory = os.environ[PREVIOUS]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rpc.cli", *words],
            env={**environment, "PYTHONPATH": directory},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.poll, self.wait = self._process.poll, self._process.wait
        self.send_signal, self.kill = self._process.send_signal, self._process.kill

    @property
    def stdout(self) -> BinaryIO:
        assert self._process.stdout is not None
        return self._process.stdout  # type: ignore[return-value]

    @property
    def stderr(self) -> BinaryIO:
        assert self._process.stderr is not None
        return self._process.stderr  # type: ignore[return-value]


def older(words: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Begin `persist WORDS` by a build of before."""
    if PREVIOUS in os.environ:
        return Checkout(words, environment)
    return Forked(words, environment)


def ran_older(*words: str) -> str:
    """What `persist WORDS` prints by a build of before. It has to end well."""
    process = older(words, os.environ)
    with process.stdout, process.stderr:
        printed = process.stdout.read().decode()
        said = process.stderr.read().decode()
    assert process.wait() == 0, said
    return printed
