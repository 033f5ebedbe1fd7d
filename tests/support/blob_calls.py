"""What stores of blobs in memory are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from blob.memory_blobs import MemoryBlob


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The verb and the key of each call for one blob, from now on."""
    calls: list[tuple[str, str]] = []
    for verb in ("get", "get_range", "put", "stat"):
        original = getattr(MemoryBlob, verb)

        def call(store: MemoryBlob, key: str, *given: Any, verb: str = verb, original: Any = original) -> Any:
            calls.append((verb, key))
            return original(store, key, *given)

        monkeypatch.setattr(MemoryBlob, verb, call)
    return calls
