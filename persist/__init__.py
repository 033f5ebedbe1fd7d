"""persist: durable, definite time-varying collections for PySpark on blob storage and a compare-and-set log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persist.client.connect import Client, Connection, connect

__all__ = ["Client", "Connection", "connect"]


def __getattr__(name: str) -> Any:
    """Load the client when it is asked for, so that importing the core stays free of Arrow."""
    if name in __all__:
        from persist.client import connect as client

        return getattr(client, name)
    raise AttributeError(f"module 'persist' has no attribute {name!r}")
