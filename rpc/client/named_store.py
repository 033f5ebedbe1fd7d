"""The blob store that a server names, as a client opens it with credentials of its own: only where those may go."""

from __future__ import annotations

import os
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from blob import Blob, BlobError, open_blob
from persist.client import identity

_AZURE = ".core.windows.net"
_BY_NAME = frozenset({"gs", "hdfs"})  # the bucket, or the host of the cluster, is all that there is to say


def opened_here(url: str, proof: str) -> Blob | None:
    """The store, if it can be opened from here and is the one that the proof is of; None: the server is to be asked.

    It takes as long as the store does.
    """
    try:
        place = place_of(url)
        blob = None if place is None else open_blob(place)
    except (BlobError, ImportError, ValueError):
        return None
    if blob is None or identity.is_same(blob, proof):
        return blob
    blob.close()
    return None


def place_of(url: str) -> str | None:
    """Of a location that a server names: scheme, bucket, prefix and region. None: this client does not go there.

    How to ask a store, and for how long, is the client's to say. So is to which host its credentials go: an endpoint
    of S3 is taken only where boto3 goes there by itself, and a host for Azure only where it is Azure's. Raises
    ValueError (this is no URL), and BlobError, ImportError (boto3 cannot be used here).
    """
    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.netloc}{parts.path}"
    if parts.scheme == "s3":
        return _bucket(place, dict(parse_qsl(parts.query)))
    if parts.scheme == "file":
        return place if os.path.isdir(unquote(parts.path)) else None
    if parts.scheme in ("abfs", "abfss"):
        return place if parts.netloc.endswith(_AZURE) else None
    return place if parts.scheme in _BY_NAME else None


def _bucket(place: str, told: dict[str, str]) -> str | None:
    kept = {name: told[name] for name in ("endpoint", "region") if told.get(name)}
    if "endpoint" in kept:
        from blob.s3 import own_endpoint

        if kept["endpoint"].rstrip("/") != own_endpoint(kept.get("region")).rstrip("/"):
            return None
    return f"{place}?{urlencode(kept, safe=':/')}" if kept else place
