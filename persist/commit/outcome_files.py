"""Files of outcomes in the blob store: what a commit must know of them, and moving outcomes from the State into one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from blob import Blob, BlobNotFound
from persist.attributes.storage import NodeCache, StaleIndex
from persist.commit.store_clock import probed
from persist.core import commands as c
from persist.core.ids import IdSource
from persist.core.keys import outcomes_key
from persist.core.outcomes import Outcome, OutcomeFile, births, key_of, to_merge
from persist.core.state import Policy, State
from persist.core.transitions.outcomes import Written, flush_is_due, is_alone, is_outlived, to_flush
from persist.formats.outcome_frames import HEADER_BYTES, PREFIX_BYTES, decode, encode, places, read_prefixes
from persist.formats.store_errors import translated, translated_but_missing


class OutcomeFiles:
    """The files of one location. Thread-safe. Raises StaleIndex when a file is gone, and the errors of the store."""

    def __init__(self, blob: Blob, ids: IdSource, cache: NodeCache) -> None:
        self._blob = blob
        self._ids = ids
        self._cache = cache

    def remembered(self, state: State, commands: Iterable[c.Command]) -> dict[str, Outcome]:
        """What the files hold of the tokens of these commands, and of writers that are to be registered."""
        found = {}
        for command in commands:
            key = _asked(command)
            if key is None or key in state.outcomes:
                continue
            for file in reversed(state.outcome_files):
                if file.may_hold(key) and (outcome := self._lookup(file, key)) is not None:
                    found[key] = outcome
                    break
        return found

    def flush(self, state: State, policy: Policy) -> c.FlushOutcomes | None:
        """Write the recent outcomes of the State to a file, together with newer files where that leaves fewer of them.

        None: there is nothing to do.
        """
        if not flush_is_due(state, policy):
            return None
        outcomes = to_flush(state)
        if len(outcomes) < policy.outcomes_flush_at:
            return c.FlushOutcomes((), (), None, self._store_ms(state, policy))
        merged = to_merge(state.outcome_files, len(outcomes), state.lease_now_ms, policy.outcome_kept_ms)
        data = encode(outcomes, [self._read(file, 0, file.size) for file in merged])
        key = outcomes_key(state.shard_id, self._ids)
        with translated():
            self._blob.put(key, data)
        ages = [outcome.at_ms for outcome in outcomes.values()]
        born = births(outcomes)
        file = OutcomeFile(
            key,
            len(data),
            len(outcomes) + sum(file.count for file in merged),
            min([*ages, *(file.first_ms for file in merged)]),
            max([*ages, *(file.last_ms for file in merged)]),
            min([*born, *(file.born_first for file in merged if file.born_last)], default=0),
            max([*born, *(file.born_last for file in merged)], default=0),
            len(born) < len(outcomes) or any(file.free for file in merged),
        )
        taken = tuple(file.key for file in merged)
        return c.FlushOutcomes(taken, tuple(outcomes), file, self._store_ms(state, policy))

    def _store_ms(self, state: State, policy: Policy) -> int | None:
        """The store's time, where a file is to be forgotten."""
        if any(is_outlived(file, state.lease_now_ms, policy) for file in state.outcome_files):
            return probed(self._blob, self._ids)
        return None

    def _lookup(self, file: OutcomeFile, key: str) -> Outcome | None:
        place = (file.key, 0)
        cached = self._cache.get(place)
        if cached is None:
            prefixes = read_prefixes(self._read(file, 0, HEADER_BYTES + PREFIX_BYTES * file.count))
            cached = prefixes.view(np.uint8)  # its `size` is in bytes
            self._cache.put(place, cached)
        start, length = places(cached.view(np.uint32), key)
        return dict(decode(self._read(file, start, length))).get(key) if length else None

    def _read(self, file: OutcomeFile, start: int, length: int) -> bytes:
        try:
            with translated_but_missing():
                return self._blob.get_range(file.key, start, length)
        except BlobNotFound as error:
            raise StaleIndex(str(error)) from error


def _asked(command: c.Command) -> str | None:
    """The id under which a file may remember something that the command must know."""
    if isinstance(command, Written):
        return key_of(command.token) if is_alone(command) else None
    return key_of(command.writer) if isinstance(command, c.RegisterWriter) else None
