"""How large a law or a proof is: `make test` and `.ci/run` try few examples, rounds and seeds, `make proof` all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import Any

import pytest
from hypothesis import settings

EXAMPLES = 10  # of each law
EXAMPLES_OF_A_PROOF = 30
SEED_VARIABLE = "PERSIST_TEST_SEEDS"  # names the base of a run, to repeat it
SEEDS_A_DAY = 1_000


def seed_base() -> int:
    """The first seed of today's proofs; another one every day unless the environment names it."""
    given = os.environ.get(SEED_VARIABLE)
    return int(given) if given else (datetime.now(UTC).date() - date(2026, 1, 1)).days * SEEDS_A_DAY


def is_whole() -> bool:
    """Whether this run is one of `make proof`. Elsewhere a proof is a smoke of itself."""
    return settings().max_examples == EXAMPLES_OF_A_PROOF


def size(few: int, whole: int) -> int:
    """How many rounds, kills or examples a test tries: `whole` in `make proof`, `few` elsewhere."""
    return whole if is_whole() else few


def seeds(count: int, few: int = 2) -> range:
    """Seeds of a walk: `count` in `make proof`, which differ from day to day, and the first `few` elsewhere."""
    return range(seed_base(), seed_base() + count) if is_whole() else range(few)


def thinned(values: Iterable[Any], every: int) -> list[Any]:
    """Each `every`-th of the values, which `make test` tries, and the others, which are left to `make proof`."""
    return [one if at % every == 0 else pytest.param(one, marks=pytest.mark.proof) for at, one in enumerate(values)]


def walks(few: Iterable[int], proof: int, every: int = 1) -> list[Any]:
    """The seeds of each run of a walk: the few one by one, thinned by `every`, and as a proof so many in one run."""
    return [*thinned([[seed] for seed in few], every), pytest.param(seeds(proof), marks=pytest.mark.proof, id="many")]


def examples(times: float, *, of_a_proof: int | None = None, **more: Any) -> settings:
    """Settings of a law that is tried `times` as often as others; of a proof `of_a_proof` times, where that is given.

    Others have `EXAMPLES` in `make test`, and `EXAMPLES_OF_A_PROOF` in a proof.
    """
    usual = settings().max_examples
    wanted = of_a_proof if of_a_proof is not None and is_whole() else round(times * usual)
    return settings(max_examples=max(1, wanted), **more)
