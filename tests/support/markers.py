"""Rows with markers, and a search for these in every byte of two stores."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus


def marker() -> str:
    """32 random bytes, as 64 characters."""
    return secrets.token_hex(32)


def uncompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on parts are written as their bytes are, so that a search finds what is in them."""
    real = pq.ParquetWriter

    def plain(*given: Any, **named: Any) -> Any:
        return real(*given, **{**named, "compression": "none", "compression_level": None, "use_dictionary": False})

    monkeypatch.setattr(pq, "ParquetWriter", plain)


def in_memory(blob: MemoryBlob, consensus: MemoryConsensus) -> Mapping[str, bytes]:
    """All bytes of stores in memory, by where they lie."""
    found = {f"blob {key}": data for key, (data, _) in blob._blobs.items()}
    logs = consensus._logs.items()
    return {**found, **{f"log {key} {seqno}": data for key, log in logs for seqno, data in log.items()}}


def in_files(directory: Path) -> Mapping[str, bytes]:
    """All bytes of all files of a directory, by their names."""
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def where(stored: Mapping[str, bytes], wanted: str) -> list[str]:
    """Where the marker, or its first half, lies."""
    needles = {wanted.encode(), wanted[: len(wanted) // 2].encode()}
    return sorted(place for place, data in stored.items() if any(needle in data for needle in needles))
