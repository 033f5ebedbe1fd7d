"""Patience with Spark, which gives a Python process of a stream ten seconds to start, and no setting lengthens that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TRIES_MAX = 50
IMPATIENT = "Python worker failed to connect back"


def patiently(work: Callable[[], T]) -> T:
    """What `work` gives. It is done again where Spark was impatient: a stream goes on from its checkpoint."""
    for _ in range(TRIES_MAX):
        try:
            return work()
        except Exception as error:
            if IMPATIENT not in str(error):
                raise
    return work()
