"""Waiting for what has to happen. No test passes or fails by how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 900.0  # what has not happened after so long does not happen, however slow the machine
LOOK_S = 0.05


def wait_until(ready: Callable[[], object], what: str) -> None:
    """Look again and again until `ready` says so. AssertionError names `what` if it never does."""
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not in {WAIT_S:.0f} s"
        time.sleep(LOOK_S)
