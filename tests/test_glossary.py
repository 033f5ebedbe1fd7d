"""Every piece of code that docs/concepts.md names exists, and no word stands there twice."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import persist.core.batch
import persist.core.state

ROOT = Path(__file__).resolve().parent.parent
CONCEPTS = ROOT / "docs" / "concepts.md"
_ROW = re.compile(r"\| (?P<word>[^|]+) \| (?P<meaning>[^|]+) \| (?P<code>[^|]+) \|")
_BARE = {
    "State": persist.core.state.State,
    "Part": persist.core.batch.Part,
    "Leased": persist.core.state.Leased,
}


def rows() -> Iterator[tuple[str, str, str]]:
    for line in CONCEPTS.read_text(encoding="utf-8").splitlines():
        found = _ROW.fullmatch(line)
        if found and found["word"] not in ("word", "---"):
            yield found["word"], found["meaning"], found["code"]


def exists(name: str) -> bool:
    """Whether a file, a module, something in a module, or a field of a class is there."""
    if name.startswith("__"):
        return name in ("__time", "__diff")
    if "/" in name:
        return (ROOT / name).exists()
    first, _, rest = name.partition(".")
    if first in _BARE:
        return hasattr(_BARE[first], rest)
    try:
        importlib.import_module(name)
        return True
    except ImportError:
        module, _, last = name.rpartition(".")
        return hasattr(importlib.import_module(module), last)


@pytest.mark.parametrize(("word", "code"), [(word, code) for word, _, code in rows()])
def test_what_a_word_names_in_code_exists(word: str, code: str) -> None:
    named = re.findall(r"`([^`]+)`", code)
    assert named, f"{word} names no code"
    assert [name for name in named if not exists(name)] == []


def test_no_word_has_two_meanings() -> None:
    words = [word for listed, _, _ in rows() for word in listed.split(", ")]
    assert sorted(set(words)) == sorted(words)
