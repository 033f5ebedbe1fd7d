"""How many examples of a law are tried."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

EXAMPLES = 15  # of each law
EXAMPLES_OF_A_PROOF = 20


def examples(times: float, *, of_a_proof: int | None = None, **more: Any) -> settings:
    """Settings of a law that is tried `times` as often as others; of a proof `of_a_proof` times, where that is given.

    Others have `EXAMPLES` in `make test`, and `EXAMPLES_OF_A_PROOF` in a proof.
    """
    usual = settings().max_examples
    wanted = of_a_proof if of_a_proof is not None and usual == EXAMPLES_OF_A_PROOF else round(times * usual)
    return settings(max_examples=max(1, wanted), **more)
