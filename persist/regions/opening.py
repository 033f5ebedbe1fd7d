"""Opening a copy by the URL of its blob store. Found by name from `persist.client.connect`, which lies below."""

from __future__ import annotations

import re
from typing import Any

from blob import open_blob, without_secrets
from blob.blob_urls import is_there
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import LocationSettings, directory_urls
from persist.core.errors import InvalidUsage
from persist.formats.store_errors import translated
from persist.regions.replica import Home, Replica
from persist.regions.replica_follower import FollowSettings

_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")


def check_region(region: str) -> str:
    """Return it unchanged. Raises InvalidUsage: no region can be called so."""
    if not _REGION.match(region):
        raise InvalidUsage(f"{region[:60]!r} is no name of a region: 1 to 32 of a-z 0-9 -, and not - first")
    return region


def open_replica(
    url: str,
    home: Home | None = None,
    settings: LocationSettings | None = None,
    follow: FollowSettings | None = None,
) -> Replica:
    """Open the copy whose blob store is at `url`; `persist:///dir` is that of the directory.

    Raises InvalidUsage (the URL makes no sense, or nothing has a location there), Unavailable.
    """
    if url.startswith("persist:"):
        url = directory_urls(url, makes=False)[0]
    with translated():
        if not is_there(url):
            raise InvalidUsage(f"{without_secrets(url)} does not exist")
        blob = open_blob(url)
    replica = Replica(blob, home or Home(), follow=follow, settings=settings)
    try:
        replica.check()
    except BaseException:
        replica.close()
        raise
    return replica


def open_transport(connection: Any) -> EmbeddedTransport:
    """The transport of a `Connection` with `read_only`."""
    url = connection.url or connection.blob
    if connection.consensus is not None or not url:
        raise InvalidUsage("read_only needs the blob store alone: give a url, or a blob location, and no consensus")
    return EmbeddedTransport(open_replica(url, settings=connection.location))
