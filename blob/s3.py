"""Blobs in S3 and whatever speaks its protocol, with boto3; its options and errors."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import boto3
from botocore import exceptions as boto
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from blob.cache import RecentPuts
from blob.errors import (
    BlobError,
    BlobExists,
    BlobMisconfigured,
    BlobNotFound,
    BlobUnavailable,
    is_ambiguous,
    option_said,
)
from blob.interface import Blob, BlobStat, SignedPut, Unfinished, check_key, check_prefix, check_process, check_range

# Sorts what boto3 raises: by what the caller should do, naming the setting where one is wrong.


_SETTINGS = {
    "NoSuchBucket": "the bucket name",
    "InvalidBucketName": "the bucket name",
    "InvalidAccessKeyId": "the access key (AWS_ACCESS_KEY_ID)",
    "SignatureDoesNotMatch": "the secret key (AWS_SECRET_ACCESS_KEY)",
    "InvalidToken": "the session token (AWS_SESSION_TOKEN)",
    "ExpiredToken": "the session token (AWS_SESSION_TOKEN): it has expired",
    "RequestTimeTooSkewed": "this machine's clock",
    "AccessDenied": "the credentials and their rights to get, put, delete and list",
    "403": "the credentials and their rights to get, put, delete and list",
    "PermanentRedirect": "region and endpoint",
    "301": "region and endpoint",
    "AuthorizationHeaderMalformed": "region",
    "IllegalLocationConstraintException": "region",
}
_MISSING = {"NoSuchKey", "404", "NotFound", "InvalidRange", "416"}
_FOR_NOW = {
    "NoSuchUpload",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "QuotaExceeded",
}

_WRONG_SETUP = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.NoRegionError,
    boto.InvalidRegionError,
    boto.ProfileNotFound,
    boto.ParamValidationError,
    boto.SSLError,
    boto.InvalidEndpointConfigurationError,
)


class Refused(Exception):
    """The store refused a conditional put. `why`: `exists`, `race` (try again) or `unsupported`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def translate(error: Exception, key: str, url: str) -> BlobError | Refused | None:
    """The error to raise instead, or None if `error` is not the store's (a bug, or sorted already)."""
    if isinstance(error, boto.ClientError):
        return _answer(error, key, url)
    if isinstance(error, _WRONG_SETUP):
        return BlobMisconfigured(f"{url} cannot be used; check the credentials, region and endpoint: {error}")
    if isinstance(error, boto.BotoCoreError | HTTPError | OSError):
        return BlobUnavailable(f"{url} did not answer: {error}")
    return None


def _answer(error: boto.ClientError, key: str, url: str) -> BlobError | Refused:
    said = error.response.get("Error", {})
    code = str(said.get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in _SETTINGS:
        return BlobMisconfigured(f"{url} refuses; check {_SETTINGS[code]}: {code} {said.get('Message', '')}".rstrip())
    if code == "PreconditionFailed" or status == 412:
        return Refused("exists")
    if code == "ConditionalRequestConflict" or (status == 409 and error.operation_name == "PutObject"):
        return Refused("race")
    if code == "NoSuchKey" and error.operation_name == "PutObject":  # Ceph, where two puts of one key meet
        return Refused("race")
    if status == 501 and error.operation_name in ("PutObject", "CompleteMultipartUpload"):
        return Refused("unsupported")
    if code in _FOR_NOW:
        return BlobUnavailable(f"{url} refused for now: {code} {said.get('Message', '')}".rstrip())
    if code in _MISSING or status in (404, 416):
        return BlobNotFound(f"no blob {key}, or it ends before the range asked for ({code})")
    if status >= 500 or status in (408, 429) or status == 0:
        return BlobUnavailable(f"{url} refused for now: {code} {said.get('Message', '')}".rstrip())
    return BlobMisconfigured(f"{url} refused {error.operation_name}: {code} {said.get('Message', '')}".rstrip())


# What an `s3:` location says: bucket, prefix and options.


_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Options of `s3://bucket/prefix?option=value&…`. Times are seconds, sizes bytes.

    `endpoint`: base URL of a server that is not AWS's. `region`; `profile`: a section of the AWS files.
    `path_style`: bucket in the path and not in the host name; by default exactly with an endpoint.
    `connections`: size of the connection pool. `attempts`: tries per request, the first included.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    path_style: bool = False
    connections: int = 32
    connect_timeout: float = 5.0
    read_timeout: float = 30.0
    attempts: int = 4

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise BlobMisconfigured(
                f"s3: bucket {self.bucket!r} must be 3 to 63 of a-z 0-9 . -, as in s3://bucket/prefix"
            )
        if not re.fullmatch(r"[A-Za-z0-9._/-]*", self.prefix):
            raise BlobMisconfigured(f"s3: prefix {self.prefix!r} must be of A-Z a-z 0-9 . _ / -")
        if self.endpoint is not None and not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]_-]+/?", self.endpoint):
            raise BlobMisconfigured(
                "s3: option endpoint must be a URL such as http://127.0.0.1:9000, without credentials"
            )
        for name in ("connections", "attempts", "connect_timeout", "read_timeout"):
            if getattr(self, name) <= 0:
                raise BlobMisconfigured(f"s3: option {name} must be greater than 0")

    @classmethod
    def from_url(cls, url: str) -> S3Settings:
        """BlobMisconfigured names the option that is wrong."""
        if "@" in url or is_ambiguous(url) or ":" in urlsplit(url).netloc:
            raise BlobMisconfigured("s3: takes no credentials in the URL; set them as AWS_* variables or a profile")
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        values: dict[str, Any] = {"path_style": "true" if "endpoint" in given else "false", **given}
        kinds = {field.name: str(field.type) for field in fields(cls) if field.name not in ("bucket", "prefix")}
        for name, text in values.items():
            if name not in kinds:
                raise BlobMisconfigured(f"s3: {option_said(name, text)} is not one of {', '.join(kinds)}")
            values[name] = _value(name, text, kinds[name])
        return cls(bucket=parts.netloc, prefix=unquote(parts.path).strip("/"), **values)

    def options(self) -> dict[str, str | None]:
        """The options that say where the data is (and hold no secret)."""
        shown: dict[str, str | None] = {"endpoint": self.endpoint, "region": self.region}
        if self.path_style != (self.endpoint is not None):
            shown["path_style"] = str(self.path_style).lower()
        return shown


def _value(name: str, text: str, kind: str) -> Any:
    try:
        if kind == "bool":
            return _BOOLEANS[text.lower()]
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except (KeyError, ValueError):
        raise BlobMisconfigured(f"s3: option {name} must be a {kind}") from None
    return text


# Blobs in S3 and whatever speaks its protocol, with boto3.
#
# Write-once is enforced by the store (`If-None-Match: *`) where it can; a store that answers "not implemented" is asked
# for the key first. Large blobs go up as multipart uploads, a few parts at a time.


MULTIPART_BYTES, PART_BYTES = 32 * 2**20, 16 * 2**20
"""A blob longer than the first goes up in parts of the second, which S3 asks to be at least 5 MiB."""

RANGE_BYTES = 8 * 2**20
"""A longer range is read by several requests at the same time, of about so many bytes each."""

DELETE_BATCH = 1_000
"""Keys per DeleteObjects call: S3's limit."""

LIST_PAGE = 1_000
"""Keys per ListObjectsV2 call: S3's limit."""

BODY_ATTEMPTS_MAX = 3
"""How often a download whose body broke off is begun anew; boto3 itself retries only what precedes the body."""

PUT_ATTEMPTS_MAX = 3
"""How often a put that met another put of the same key (409) is tried."""

UPLOAD_THREADS = 4
"""Parts of one multipart upload that are under way at the same time."""

READ_THREADS = 32
"""Pieces of long ranges that are under way at the same time, of all readers together, beside the first of each."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _Threads:
    """A pool that is made when it is first needed. Thread-safe."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._lock = threading.Lock()
        self._made: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._made is None:
                self._made = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)
            return self._made

    def close(self) -> None:
        """Wait for what is under way."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.shutdown()


class S3Blob(Blob):
    """A bucket and a prefix. Credentials come by boto3's usual chain."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._recent = RecentPuts(time.monotonic)
        self._pid = os.getpid()
        self._bucket = settings.bucket
        self._base = f"{settings.prefix}/" if settings.prefix else ""
        self._conditional = True
        self._keeps_keys: bool | None = None  # whether the store itself refuses to overwrite; None: not asked yet
        self._uploads = _Threads(UPLOAD_THREADS, "blob-s3-upload")
        self._reads = _Threads(min(READ_THREADS, settings.connections), "blob-s3-read")
        try:
            owner = boto3.session.Session(profile_name=settings.profile, region_name=settings.region)
            self._opened = owner.client("s3", endpoint_url=settings.endpoint, config=_config(settings))
        except (BotoCoreError, ValueError) as error:
            raise BlobMisconfigured(f"{self.url} cannot be opened: {error}") from error

    @property
    def _client(self) -> Any:
        check_process(self._pid, self.url)
        return self._opened

    @classmethod
    def from_url(cls, url: str) -> S3Blob:
        """`s3://bucket/prefix?endpoint=…&region=…`; see S3Settings for every option."""
        return cls(S3Settings.from_url(url))

    @property
    def url(self) -> str:
        shown = {name: value for name, value in self._settings.options().items() if value is not None}
        query = f"?{urlencode(shown, safe=':/')}" if shown else ""
        return f"s3://{self._settings.bucket}/{self._settings.prefix}{query}".rstrip("/")

    def put(self, key: str, data: bytes | memoryview) -> None:
        name = self._name(check_key(key))
        body = bytes(data)
        self._put_new(key, name, body)
        self._recent.add(key, len(body))

    def put_here(self, key: str) -> int | None:
        return self._recent.size(key)

    def _put_new(self, key: str, name: str, body: bytes) -> None:
        for attempt in range(1, PUT_ATTEMPTS_MAX + 1):
            try:
                self._put_once(name, body)
                return
            except Refused as refused:
                if refused.why == "unsupported":
                    _log.warning(
                        "%s does not support If-None-Match; keys are looked up before they are written", self.url
                    )
                    self._conditional = False
                elif refused.why == "exists":
                    self._confirm_same(key, body)
                    return
                elif attempt == PUT_ATTEMPTS_MAX:
                    raise BlobUnavailable(f"blob {key} is being written by somebody else, {attempt} tries") from refused
        raise BlobUnavailable(f"blob {key} could not be put in {PUT_ATTEMPTS_MAX} tries")

    def get(self, key: str) -> bytes:
        check_key(key)
        return self._download(key, None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        check_key(key)
        if length == 0:
            # HTTP has no empty range.
            found = self.stat(key)
            if found is None or found.size < start:
                raise BlobNotFound(f"no blob {key} of at least {start} bytes")
            return b""
        pieces = max(1, round(length / RANGE_BYTES))
        if pieces == 1:
            return self._piece(key, start, start + length)
        # A connection has its rate: of a long range the pieces come by several. The first one comes by this thread.
        ends = [start + length * number // pieces for number in range(pieces + 1)]
        others = [self._reads.pool().submit(self._piece, key, *ends_of) for ends_of in pairwise(ends[1:])]
        try:
            return b"".join([self._piece(key, ends[0], ends[1]), *(each.result() for each in others)])
        finally:
            for each in others:
                each.cancel()

    def _piece(self, key: str, start: int, end: int) -> bytes:
        data = self._download(key, f"bytes={start}-{end - 1}")
        if len(data) != end - start:
            raise BlobNotFound(f"blob {key} ends at byte {start + len(data)}, before {end}")
        return data

    def stat(self, key: str) -> BlobStat | None:
        name = self._name(check_key(key))
        try:
            head = self._calling(key, lambda: self._client.head_object(Bucket=self._bucket, Key=name))
        except BlobNotFound:
            return None
        return BlobStat(key, head["ContentLength"], int(head["LastModified"].timestamp() * 1000))

    def delete(self, keys: Sequence[str]) -> None:
        names = [self._name(check_key(key)) for key in keys]
        self._recent.forget(keys)
        for start in range(0, len(names), DELETE_BATCH):
            self._delete_batch(names[start : start + DELETE_BATCH])

    def list(self, prefix: str) -> Iterator[BlobStat]:
        check_prefix(prefix)
        return self._listed(prefix)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Multipart uploads that were neither completed nor aborted. Needs `s3:ListBucketMultipartUploads`.

        Where a server tells of none below the prefix, all are asked for: MinIO heeds only a prefix that is a whole key.
        """
        start = self._name(check_prefix(prefix))
        found = list(self._uploads_of({"Prefix": start})) or list(self._uploads_of({}))
        for one in found:
            if one["Key"].startswith(start):
                where, begun_ms = one["Key"].removeprefix(self._base), int(one["Initiated"].timestamp() * 1000)
                yield Unfinished(f"{where} (upload)", -1, begun_ms, f"{one['UploadId']} {one['Key']}")

    def _uploads_of(self, wanted: dict[str, str]) -> Iterator[dict[str, Any]]:
        asked = {"Bucket": self._bucket, **wanted}
        while True:
            page = self._calling("", partial(self._client.list_multipart_uploads, **asked))
            yield from page.get("Uploads", [])
            if not page.get("IsTruncated"):
                return
            asked |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abandon(self, found: Sequence[Unfinished]) -> None:
        for one in found:
            upload, _, name = one.token.partition(" ")
            self._abort({"Bucket": self._bucket, "Key": name}, upload)

    def check(self) -> None:
        key = f"check/{os.urandom(8).hex()}"
        self.put(key, b"check")
        if self.get_range(key, 1, 3) != b"hec" or not any(found.key == key for found in self.list(key)):
            raise BlobMisconfigured(f"{self.url} does not return what was written to it; is its endpoint an S3 server?")
        self._keeps_keys = self._refuses(self._name(key))
        if not self._keeps_keys:
            _log.warning(
                "%s ignores If-None-Match: it does not itself keep keys from being overwritten, so no URL is signed to "
                "write; clients send their parts through the server",
                self.url,
            )
        self.delete([key])

    def _refuses(self, name: str) -> bool:
        """Whether the store keeps an object that is there from a put with `If-None-Match: *`."""
        try:
            self._calling(
                name, lambda: self._client.put_object(Bucket=self._bucket, Key=name, Body=b"other", IfNoneMatch="*")
            )
        except Refused as refused:
            return refused.why == "exists"
        return False

    def _is_asked_once(self) -> bool:
        """The answer to `_refuses`, asked for with a key of its own unless `check` has asked before."""
        if self._keeps_keys is None:
            key = f"check/{os.urandom(8).hex()}"
            self.put(key, b"check")
            self._keeps_keys = self._refuses(self._name(key))
            self.delete([key])
        return self._keeps_keys

    def close(self) -> None:
        self._uploads.close()
        self._reads.close()
        self._opened.close()

    def presign_get(self, key: str, expires_s: int) -> str | None:
        return self._presign("get_object", key, expires_s)

    def presign_put(self, key: str, expires_s: int) -> SignedPut | None:
        """`If-None-Match: *` is signed too, so whoever holds the URL cannot write the key twice."""
        check_key(key)
        if not self._is_asked_once():
            return None
        return SignedPut(self._presign("put_object", key, expires_s, IfNoneMatch="*"), {"If-None-Match": "*"})

    def _name(self, key: str) -> str:
        return self._base + key

    def _delete_batch(self, names: Sequence[str]) -> None:
        batch = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        reply = self._calling("", lambda: self._client.delete_objects(Bucket=self._bucket, Delete=batch))
        for failed in reply.get("Errors", []):
            if failed.get("Code") != "NoSuchKey":
                said = f"{failed.get('Code')} {failed.get('Message', '')}"
                raise BlobUnavailable(f"blob {failed.get('Key')} was not deleted: {said}; delete it again")

    def _presign(self, operation: str, key: str, expires_s: int, **condition: str) -> str:
        parameters = {"Bucket": self._bucket, "Key": self._name(check_key(key)), **condition}
        sign = self._client.generate_presigned_url
        url: str = self._calling(key, lambda: sign(operation, Params=parameters, ExpiresIn=expires_s))
        return url

    def _put_once(self, name: str, body: bytes) -> None:
        if not self._conditional and self._exists(name):
            raise Refused("exists")
        if len(body) > MULTIPART_BYTES:
            self._put_parts(name, body)
            return
        condition = {"IfNoneMatch": "*"} if self._conditional else {}
        self._calling(name, lambda: self._client.put_object(Bucket=self._bucket, Key=name, Body=body, **condition))

    def _put_parts(self, name: str, body: bytes) -> None:
        # Some servers ignore the condition on completion, so a large blob is looked up in any case.
        if self._exists(name):
            raise Refused("exists")
        client, target = self._client, {"Bucket": self._bucket, "Key": name}
        upload = self._calling(name, lambda: client.create_multipart_upload(**target)["UploadId"])
        size = PART_BYTES
        view = memoryview(body)

        def send(number: int) -> dict[str, Any]:
            piece = bytes(view[(number - 1) * size : number * size])
            part = self._calling(
                name, lambda: client.upload_part(**target, UploadId=upload, PartNumber=number, Body=piece)
            )
            return {"PartNumber": number, "ETag": part["ETag"]}

        try:
            sending = [self._uploads.pool().submit(send, number) for number in range(1, -(-len(body) // size) + 1)]
            # All of them have to be over before an abort, or a late part would outlive it.
            wait(sending)
            parts = [each.result() for each in sending]
            condition = {"IfNoneMatch": "*"} if self._conditional else {}
            self._calling(
                name,
                lambda: client.complete_multipart_upload(
                    **target, UploadId=upload, MultipartUpload={"Parts": parts}, **condition
                ),
            )
        except (BlobError, Refused):
            self._abort(target, upload)
            raise

    def _abort(self, target: dict[str, str], upload: str) -> None:
        try:
            self._client.abort_multipart_upload(**target, UploadId=upload)
        except (BotoCoreError, ClientError) as error:
            _log.warning(
                "the parts of %s stay until the bucket's lifecycle rule removes them: %s", target["Key"], error
            )

    def _exists(self, name: str) -> bool:
        try:
            self._calling(name, lambda: self._client.head_object(Bucket=self._bucket, Key=name))
        except BlobNotFound:
            return False
        return True

    def _confirm_same(self, key: str, body: bytes) -> None:
        found = self.stat(key)
        if found is None:
            raise BlobUnavailable(f"blob {key} was there and is gone again; put it again")
        if found.size != len(body) or self.get(key) != body:
            raise BlobExists(f"blob {key} exists with other bytes; keys are single-use")

    def _download(self, key: str, byte_range: str | None) -> bytes:
        name = self._name(key)
        limits = {} if byte_range is None else {"Range": byte_range}

        def once() -> bytes:
            with self._client.get_object(Bucket=self._bucket, Key=name, **limits)["Body"] as body:
                data: bytes = body.read()
                return data

        for attempt in range(1, BODY_ATTEMPTS_MAX + 1):
            try:
                return self._calling(key, once)
            except BlobUnavailable as error:
                # Only a broken body is worth another try here: boto3 has already retried everything before it.
                if attempt == BODY_ATTEMPTS_MAX or isinstance(error.__cause__, ClientError):
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _listed(self, prefix: str) -> Iterator[BlobStat]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._name(prefix), PaginationConfig={"PageSize": LIST_PAGE}
        )
        following = iter(pages)
        while True:
            page = self._calling(prefix, lambda: next(following, None))
            if page is None:
                return
            for found in page.get("Contents", []):
                modified_ms = int(found["LastModified"].timestamp() * 1000)
                yield BlobStat(found["Key"][len(self._base) :], found["Size"], modified_ms)

    def _calling(self, key: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            failure = translate(error, key, self.url)
            if failure is None:
                raise
            raise failure from error


def own_endpoint(region: str | None) -> str:
    """Where boto3 goes of itself: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, what the AWS files say, or AWS in the region.

    Contacts nobody. Raises BlobMisconfigured.
    """
    try:
        owner = boto3.session.Session(region_name=region)
        client = owner.client("s3", aws_access_key_id="nobody", aws_secret_access_key="none")  # it looks for none
    except (BotoCoreError, ValueError) as error:
        raise BlobMisconfigured(f"boto3 cannot be used here: {error}") from error
    found = str(client.meta.endpoint_url)
    client.close()
    return found


def _config(settings: S3Settings) -> Config:
    # Servers other than AWS's often do not know the newer checksums, and every part has its own.
    checksums = "when_required" if settings.endpoint else "when_supported"
    return Config(
        signature_version="s3v4",
        s3={"addressing_style": "path" if settings.path_style else "virtual"},
        max_pool_connections=settings.connections,
        connect_timeout=settings.connect_timeout,
        read_timeout=settings.read_timeout,
        retries={"mode": "standard", "total_max_attempts": settings.attempts},
        request_checksum_calculation=checksums,
        response_checksum_validation=checksums,
        tcp_keepalive=True,
    )
