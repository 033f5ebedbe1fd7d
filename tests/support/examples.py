"""How many examples of a law are tried."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(times: float, **more: Any) -> settings:
    """Settings of a law of which `times` as many examples are tried as of others: 25 in `make test`, 60 in a proof."""
    return settings(max_examples=max(1, round(times * settings().max_examples)), **more)
