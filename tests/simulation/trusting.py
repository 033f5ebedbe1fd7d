"""Broken builds that believe what a hostile client says of its parts."""

from __future__ import annotations

from unittest.mock import patch

import persist.commit.commit_plan
import persist.commit.part_validator
import persist.core.transitions.part_admission
from persist.commit.part_validator import Inspector
from persist.commit.validation_receipts import Receipts
from tests.simulation.breaking import Broken, every


def existence_not_checked() -> Broken:
    """Nobody looks whether a blob is there, nor what is in it."""
    real = Inspector._look
    return every(
        patch.object(persist.commit.part_validator, "check_put", lambda part, blob: None),
        patch.object(Inspector, "_look", lambda self, parts, state: real(self, [p for p in parts if not p.key], state)),
    )


def left_not_remembered() -> Broken:
    """The State forgets which parts left it."""
    return patch.object(persist.commit.commit_plan, "departed", lambda state, gone: state)


def receipt_not_verified() -> Broken:
    """Any receipt will do."""
    return patch.object(Receipts, "is_good", lambda self, shard, part: bool(part.receipt))


def parts_taken_twice() -> Broken:
    """A part may be named that the State names already, and twice in a command."""
    return patch.object(persist.core.transitions.part_admission, "_check_new", lambda state, parts: None)


TRUSTING = (existence_not_checked, left_not_remembered, receipt_not_verified, parts_taken_twice)
