"""Requests, bytes and refusals by the id of the token that asked, for a bounded number of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from persist.formats.exposition import COUNTER, Family, Labelled
from rpc.auth import ANYBODY, MAINTENANCE, STRANGER, Principal

TOKENS_MAX = 100  # with series of their own; the rest are OTHER
# The labels of who is no token of the file. No id has an underscore, so that nobody's token is counted with them.
OTHER = "_other"
NOBODY = "_unknown"  # who gave no token that is known here
_OWN = ((ANYBODY, "_anybody"), (STRANGER, "_anybody"), (MAINTENANCE, "_maintenance"))


def label_of(principal: Principal | None) -> str:
    """Under which label a caller is counted; None: nobody who is known here."""
    if principal is None:
        return NOBODY
    return next((label for own, label in _OWN if principal is own), principal.name)


class TokenFigures:
    """Counts of each token. All methods but `families` belong to the event loop's thread."""

    def __init__(self, tokens_max: int = TOKENS_MAX) -> None:
        self._most = tokens_max
        self._known: dict[str, str] = {}
        self._requests: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()

    def observe(self, token: str, received: int, sent: int) -> None:
        """Count a request and the bytes of its body and of its answer's."""
        token = self._known.get(token) or self._named(token)
        self._requests[token] += 1
        self._received[token] += received
        self._sent[token] += sent

    def refused(self, token: str, kind: str) -> None:
        """Count a refusal, or a failure, by the kind of its error."""
        self._refused[self._known.get(token) or self._named(token), kind] += 1

    def families(self, only: str | None) -> Iterator[Family]:
        """All of it; `only`: of one token."""

        def shown(token: str) -> bool:
            return only is None or token == only

        requests: list[Labelled] = [((name,), n) for name, n in list(self._requests.items()) if shown(name)]
        moved: list[Labelled] = []
        for direction, counts in (("in", self._received), ("out", self._sent)):
            moved += [((name, direction), n) for name, n in list(counts.items()) if shown(name)]
        refused: list[Labelled] = [(key, n) for key, n in list(self._refused.items()) if shown(key[0])]
        yield Family("persist_token_requests_total", COUNTER, "Requests by token", ("token",), requests)
        yield Family("persist_token_bytes_total", COUNTER, "Bytes of bodies by token", ("token", "direction"), moved)
        yield Family(
            "persist_token_refusals_total", COUNTER, "Requests refused or failed by token", ("token", "kind"), refused
        )

    def _named(self, token: str) -> str:
        if len(self._known) >= self._most:
            return OTHER
        self._known[token] = token
        return token
