"""Others who act in the moment before a restore or a truncation is committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from persist.client.write import WriteHandle


def before_rewrites(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], object]) -> None:
    """Before each of the next rewrites with rows one of these happens, in their order."""
    real, left = WriteHandle.commit_rewrite, list(acts)

    def commit(handle: WriteHandle, runs: Any, *args: Any, **more: Any) -> Any:
        if runs and left:
            left.pop(0)()
        return real(handle, runs, *args, **more)

    monkeypatch.setattr(WriteHandle, "commit_rewrite", commit)
