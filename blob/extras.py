"""Libraries that only some installations have."""

from __future__ import annotations

import importlib
from typing import Any


def optional(module: str, what: str, install: str, error: type[Exception]) -> Any:
    """Import `module`. Where a library that it needs is missing, raise `error`: `what` needs it, `pip install` so."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise error(f'{what} needs {missing.name}: pip install "{install}"') from missing
