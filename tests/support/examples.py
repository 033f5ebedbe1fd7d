"""How many examples of a law are tried."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(times: float, **more: Any) -> settings:
    """Settings of a law that is tried `times` as often as others: these have 15 examples in `make test`, a proof 30."""
    return settings(max_examples=max(1, round(times * settings().max_examples)), **more)
