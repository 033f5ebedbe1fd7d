"""Errors of requests that clients and commands know too, without the server's framework."""

from __future__ import annotations

from persist.core import errors as e


class TooSlow(e.Unavailable):
    """A request that did not come in time. It goes out with its parent's kind, as the two below: clients know these."""


class RequestLineTooLong(e.InvalidUsage):
    """A URL beyond `request_line_bytes_max`."""


class HeadersTooLarge(e.InvalidUsage):
    """Headers beyond `headers_max` or `headers_bytes_max`."""


class BlobMissing(e.InvalidUsage):
    """There is no blob of that key (any more), or it ends before the range does."""

    kind = "blob_missing"
