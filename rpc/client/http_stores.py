"""Blob stores of a client: through the server's routes, presigned URLs, or with the client's own credentials."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from blob import Blob, BlobError, BlobExists, BlobMisconfigured, BlobNotFound, BlobStat, BlobUnavailable, open_blob
from blob.interface import check_key, check_range
from persist.client import deadlines, transport
from persist.core.errors import Conflict, InvalidUsage, PersistError
from persist.formats.http_messages import BlobMissing
from persist.http_client import http_connection
from persist.http_client.http_calls import Call, HttpCalls, decoded_json
from persist.http_client.http_connection import Broken, ConnectionPool, NotSent, Reply, tls_of

PRESIGNED_CONNECT_S = 5.0
PRESIGNED_READ_S = 120.0
SLOW_BYTES_PER_S = 256 * 1024  # the slowest connection for which the time-outs of blobs allow
BLOB_BYTES_MAX = 2 * 1024**3  # accepted of a blob of unknown size; the limits of servers are far lower
BLOB_BYTES_ASSUMED = 64 * 1024 * 1024  # of a blob of unknown size, for time-outs
PRESIGNED_TRIES_MAX = 4


class _Presigned(msgspec.Struct):
    """The used fields of the answer. None: the store signs no URLs."""

    get: str | None = None
    put: str | None = None
    put_headers: dict[str, str] = {}


class HttpBlob(Blob):
    """Parts through a server. With `presigned` bytes go to the store directly, by URLs that the server signs."""

    def __init__(self, calls: HttpCalls, url: str, *, presigned: bool = False) -> None:
        self._calls = calls
        self._url = url
        self._presigned = presigned
        self._pools: dict[str, ConnectionPool] = {}  # of the hosts of presigned URLs

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        if not self._put_presigned(key, data):
            self._call("PUT", key, len(data), body=data)

    def get(self, key: str) -> bytes:
        check_key(key)
        data = self._get_presigned(key, BLOB_BYTES_MAX)
        return self._call("GET", key, BLOB_BYTES_ASSUMED, bytes_max=BLOB_BYTES_MAX).data if data is None else data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_key(key)
        check_range(start, length)
        if length == 0:
            stat = self.stat(key)
            if stat is None or stat.size < start:
                raise BlobNotFound(f"blob {key} does not reach to byte {start}")
            return b""
        headers = {"range": f"bytes={start}-{start + length - 1}"}
        data = self._get_presigned(key, length, headers)
        if data is None:
            data = self._call("GET", key, length, headers=headers, bytes_max=length).data
        if len(data) != length:
            raise BlobNotFound(f"blob {key} ends before byte {start + length}")
        return data

    def stat(self, key: str) -> BlobStat | None:
        answer = self._call("HEAD", check_key(key))
        if answer.status == 404:
            return None
        try:
            return BlobStat(key, int(answer.headers["content-length"]), int(answer.headers["persist-modified-ms"]))
        except (KeyError, ValueError) as error:
            raise BlobUnavailable(f"blob {key}: the answer lacks the header {error}; does a proxy drop it?") from error

    def delete(self, keys: Sequence[str]) -> None:
        raise BlobMisconfigured("blobs cannot be deleted through a server; maintenance opens the store itself")

    def list(self, prefix: str) -> Iterator[BlobStat]:
        raise BlobMisconfigured("blobs cannot be listed through a server; maintenance opens the store itself")

    def check(self) -> None:
        try:
            self._calls.call(Call("GET", "/readyz"))
        except PersistError as error:
            raise BlobUnavailable(str(error)) from error

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _call(
        self,
        method: str,
        key: str,
        nbytes: int = 0,
        *,
        body: bytes | memoryview | None = None,
        headers: dict[str, str] | None = None,
        bytes_max: int = http_connection.ANSWER_BYTES_MAX,
    ) -> Reply:
        slow_s, path, shard = nbytes / SLOW_BYTES_PER_S, f"/v1/blobs/{key}", key.partition("/")[0]
        try:
            return self._calls.call(Call(method, path, shard, body, headers or {}, True, slow_s, bytes_max))
        except BlobMissing as error:
            raise BlobNotFound(error.message) from error
        except Conflict as error:
            raise BlobExists(error.message) from error
        except PersistError as error:
            raise BlobUnavailable(f"blob {key}: {error.message}") from error

    def _get_presigned(self, key: str, bytes_max: int, headers: dict[str, str] | None = None) -> bytes | None:
        """The bytes by a presigned URL; None: there is no usable one."""
        signed = self._signed(key)
        if signed is None or signed.get is None:
            return None
        reply = self._sent("GET", signed.get, key, headers=headers, bytes_max=bytes_max)
        if reply.status in (404, 416):
            raise BlobNotFound(f"there is no blob {key} with these bytes")
        # Any other refusal, or a redirect, means that the store rejects the URL.
        return reply.data if reply.status < 300 else None

    def _put_presigned(self, key: str, data: bytes | memoryview) -> bool:
        """Whether the blob was written. The store rejects a second write of the key: see `Blob.presign_put`."""
        signed = self._signed(key)
        if signed is None or signed.put is None:
            return False
        reply = self._sent("PUT", signed.put, key, body=data, headers=signed.put_headers)
        if reply.status != 412:
            return reply.status < 300
        if self.get(key) != bytes(data):
            raise BlobExists(f"blob {key} exists with other bytes; keys are single-use")
        return True

    def _signed(self, key: str) -> _Presigned | None:
        return decoded_json(self._call("GET", f"{key}?presign=true"), _Presigned) if self._presigned else None

    def _sent(
        self,
        method: str,
        url: str,
        key: str,
        *,
        body: bytes | memoryview | None = None,
        headers: dict[str, str] | None = None,
        bytes_max: int = http_connection.ERROR_BYTES_MAX,
    ) -> Reply:
        """The response of the store; 429, 5xx, and the 409 of concurrent puts are retried a few times."""
        known = len(body) if body is not None else bytes_max
        nbytes = known if known < BLOB_BYTES_MAX else BLOB_BYTES_ASSUMED
        for left in reversed(range(PRESIGNED_TRIES_MAX)):
            timeout_s = deadlines.at_most(PRESIGNED_READ_S + nbytes / SLOW_BYTES_PER_S)
            if timeout_s <= 0:
                raise BlobUnavailable(f"blob {key}: no time is left for a request to the store")
            try:
                parts = urlsplit(url)
                path = f"{parts.path}?{parts.query}"
                reply = self._pool(url).request(method, path, headers or {}, body, timeout_s, bytes_max)
            except (NotSent, Broken, InvalidUsage, ValueError) as error:
                if left and not isinstance(error, http_connection.TimedOut) and not deadlines.has_passed():
                    continue
                # Without the cause, which may quote the URL, a credential.
                raise BlobUnavailable(f"blob {key}: the store did not respond properly: {error}") from None
            races = method == "PUT" and reply.status in (404, 409)  # 404: from Ceph
            if reply.status < 500 and reply.status != 429 and not races:
                return reply
        raise BlobUnavailable(f"blob {key}: the store keeps failing")

    def _pool(self, url: str) -> ConnectionPool:
        """Connections to the host of a presigned URL. Raises InvalidUsage, ValueError if it is invalid."""
        parts = urlsplit(url)
        host = f"{parts.scheme}://{parts.netloc}"
        pool = self._pools.get(host)
        if pool is None:
            pool = ConnectionPool(host, connect_s=PRESIGNED_CONNECT_S, tls=tls_of([host], None), probes=False)
            pool = self._pools.setdefault(host, pool)
        return pool


# The server's blob store, opened with the client's own credentials, which must only be sent to trusted hosts.

_AZURE = ".core.windows.net"
_BY_NAME = frozenset({"gs", "hdfs"})  # the bucket or the host of the cluster identifies the store


def opened_here(url: str, proof: str) -> Blob | None:
    """The store, if this client can open it and it has this proof; else None. Blocks while the store does."""
    try:
        place = place_of(url)
        blob = None if place is None else open_blob(place)
    except (BlobError, ImportError, ValueError):
        return None
    if blob is None or transport.is_same(blob, proof):
        return blob
    blob.close()
    return None


def place_of(url: str) -> str | None:
    """The scheme, bucket, prefix and region of a store that a server names. None: this client does not open it.

    Other options of the URL are the client's decision, and so are the hosts that receive its credentials: an endpoint
    of S3 is accepted only if it is the one that boto3 uses anyway, and a host for Azure only in Azure's domain. Raises
    ValueError if this is not a URL, and BlobError, ImportError if boto3 cannot be used.
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


def _bucket(place: str, options: dict[str, str]) -> str | None:
    kept = {name: options[name] for name in ("endpoint", "region") if options.get(name)}
    if "endpoint" in kept:
        from blob.s3 import own_endpoint

        if kept["endpoint"].rstrip("/") != own_endpoint(kept.get("region")).rstrip("/"):
            return None
    return f"{place}?{urlencode(kept, safe=':/')}" if kept else place
