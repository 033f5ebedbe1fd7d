"""The blob store of a client that cannot reach the real one: by the server's routes for blobs, or presigned URLs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
import urllib3

from blob import Blob, BlobExists, BlobMisconfigured, BlobNotFound, BlobStat, BlobUnavailable
from blob.interface import check_key, check_range
from persist.client import deadlines
from persist.core.errors import Conflict, PersistError
from rpc.blob_errors import BlobMissing
from rpc.client.answers import Reply
from rpc.client.calls import Call, HttpCalls, decoded_json
from rpc.client.connections import ANSWER_BYTES_MAX, ERROR_BYTES_MAX

PRESIGNED_CONNECT_S = 5.0
PRESIGNED_READ_S = 120.0
SLOW_BYTES_PER_S = 256 * 1024  # a blob has so much longer than another call that a line of this speed can carry it
BLOB_BYTES_MAX = 2 * 1024**3  # of a blob whose size is not known before: no server takes one that is near
BLOB_BYTES_UNTOLD = 64 * 1024 * 1024  # of a blob whose size is not known before
PRESIGNED_TRIES_MAX = 4
PIECE_BYTES = 1024**2  # of an answer of the store, at a time


class _Presigned(msgspec.Struct):
    """Of what the server answers only this is used. None: the store signs no URLs."""

    get: str | None = None
    put: str | None = None
    put_headers: dict[str, str] = {}


class HttpBlob(Blob):
    """Parts through a server. With `presigned` bytes go straight to the store, by URLs that the server signs."""

    def __init__(self, calls: HttpCalls, url: str, *, presigned: bool = False) -> None:
        self._calls = calls
        self._url = url
        self._presigned = presigned
        self._direct = urllib3.PoolManager() if presigned else None

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        if not self._put_straight(key, data):
            self._call("PUT", key, len(data), body=data)

    def get(self, key: str) -> bytes:
        check_key(key)
        found = self._got_straight(key, BLOB_BYTES_MAX)
        return self._call("GET", key, BLOB_BYTES_UNTOLD, bytes_max=BLOB_BYTES_MAX).data if found is None else found

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_key(key)
        check_range(start, length)
        if length == 0:
            found = self.stat(key)
            if found is None or found.size < start:
                raise BlobNotFound(f"blob {key} does not reach to byte {start}")
            return b""
        headers = {"range": f"bytes={start}-{start + length - 1}"}
        data = self._got_straight(key, length, headers)
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
        if self._direct is not None:
            self._direct.clear()

    def _call(
        self,
        method: str,
        key: str,
        nbytes: int = 0,
        *,
        body: bytes | memoryview | None = None,
        headers: dict[str, str] | None = None,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> Reply:
        slow_s, path = nbytes / SLOW_BYTES_PER_S, f"/v1/blobs/{key}"
        try:
            return self._calls.call(Call(method, path, _shard(key), body, headers or {}, True, slow_s, bytes_max))
        except BlobMissing as error:
            raise BlobNotFound(error.message) from error
        except Conflict as error:
            raise BlobExists(error.message) from error
        except PersistError as error:
            raise BlobUnavailable(f"blob {key}: {error.message}") from error

    def _got_straight(self, key: str, bytes_max: int, headers: dict[str, str] | None = None) -> bytes | None:
        """The bytes by a presigned URL; None where there is none: then the server is asked."""
        signed = self._signed(key)
        if signed is None or signed.get is None:
            return None
        status, data = self._sent("GET", signed.get, key, None, headers, bytes_max)
        if status in (404, 416):
            raise BlobNotFound(f"there is no blob {key} with these bytes")
        # Any other refusal, or a redirection, means that the store does not take the URL.
        return data if status < 300 else None

    def _put_straight(self, key: str, data: bytes | memoryview) -> bool:
        """Whether the blob lies there now. The store keeps the key from being written twice: see `Blob.presign_put`."""
        signed = self._signed(key)
        if signed is None or signed.put is None:
            return False
        status, _ = self._sent("PUT", signed.put, key, data, signed.put_headers)
        if status != 412:
            return status < 300
        if self.get(key) != bytes(data):
            raise BlobExists(f"blob {key} exists with other bytes; keys are single-use")
        return True

    def _signed(self, key: str) -> _Presigned | None:
        if not self._presigned:
            return None
        return decoded_json(self._call("GET", f"{key}?presign=true"), _Presigned)

    def _sent(
        self,
        method: str,
        url: str,
        key: str,
        body: bytes | memoryview | None,
        headers: dict[str, str] | None,
        bytes_max: int = ERROR_BYTES_MAX,
    ) -> tuple[int, bytes]:
        """What the store says, after some tries: neither 429 nor 5xx, and no 409 of a put that meets another."""
        assert self._direct is not None
        for left in reversed(range(PRESIGNED_TRIES_MAX)):
            timeout = _timeout(key)
            ends_s = time.monotonic() + deadlines.at_most(PRESIGNED_READ_S + BLOB_BYTES_UNTOLD / SLOW_BYTES_PER_S)
            try:
                response = self._direct.request(
                    method,
                    url,
                    body=cast(bytes, body),
                    headers=headers,
                    retries=False,
                    redirect=False,
                    preload_content=False,
                    timeout=timeout,
                )
                most = bytes_max if response.status < 300 else ERROR_BYTES_MAX
                data = _body(response, most, ends_s, key)
            except urllib3.exceptions.HTTPError as error:
                if left and not deadlines.has_passed():
                    continue
                raise BlobUnavailable(f"blob {key}: the store did not answer ({error.__class__.__name__})") from None
            races = method == "PUT" and response.status in (404, 409)  # 404: Ceph's word for it
            if response.status < 500 and response.status != 429 and not races:
                return response.status, data
        raise BlobUnavailable(f"blob {key}: the store keeps failing")


def _timeout(key: str) -> urllib3.Timeout:
    """How long one try may take to connect, and for each answer: no longer than the call under way. BlobUnavailable."""
    left_s = deadlines.at_most(PRESIGNED_READ_S)
    if left_s <= 0:
        raise BlobUnavailable(f"blob {key}: the store was not asked: no time is left")
    return urllib3.Timeout(connect=min(PRESIGNED_CONNECT_S, left_s), read=left_s)


def _body(response: urllib3.BaseHTTPResponse, bytes_max: int, ends_s: float, key: str) -> bytes:
    """The body of an answer. Raises BlobUnavailable: it has more bytes than that, or is not whole in time."""
    pieces, size = [], 0
    try:
        while piece := response.read1(PIECE_BYTES):
            size += len(piece)
            if size > bytes_max:
                raise BlobUnavailable(
                    f"blob {key}: the store sends more than the {bytes_max} bytes of what was asked for"
                )
            if time.monotonic() > ends_s:
                raise BlobUnavailable(f"blob {key}: the store sends too slowly")
            pieces.append(piece)
    except BaseException:
        response.close()
        raise
    response.release_conn()
    return b"".join(pieces)


def _shard(key: str) -> str:
    return key.partition("/")[0]
