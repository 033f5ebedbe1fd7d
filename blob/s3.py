"""Blobs in S3 and compatible stores, with boto3: the options of the URL, the errors, and the store.

Write-once is enforced by the store (`If-None-Match: *`) if it supports that; otherwise a put first checks whether the
key exists. Large blobs are multipart uploads, a few parts at a time.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
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
    describe_option,
    is_ambiguous,
)
from blob.interface import Blob, BlobStat, SignedPut, Unfinished, check_key, check_prefix, check_process, check_range

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
_TEMPORARY = {
    "NoSuchUpload",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "QuotaExceeded",
}

_SETUP_ERRORS = (
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
    """The store refused a conditional put. `reason`: `exists`, `race` (try again) or `unsupported`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def translate(error: Exception, key: str, url: str) -> BlobError | Refused | None:
    """The error to raise instead, or None if `error` is not boto3's (a bug, or already translated)."""
    if isinstance(error, boto.ClientError):
        return _translate_response(error, key, url)
    if isinstance(error, _SETUP_ERRORS):
        return BlobMisconfigured(f"{url} cannot be used; check the credentials, region and endpoint: {error}")
    if isinstance(error, boto.BotoCoreError | HTTPError | OSError):
        return BlobUnavailable(f"{url} did not answer: {error}")
    return None


def _translate_response(error: boto.ClientError, key: str, url: str) -> BlobError | Refused:
    details = error.response.get("Error", {})
    code = str(details.get("Code", ""))
    reason = f"{code} {details.get('Message', '')}".rstrip()
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in _SETTINGS:
        return BlobMisconfigured(f"{url} rejects the request; check {_SETTINGS[code]}: {reason}")
    if code == "PreconditionFailed" or status == 412:
        return Refused("exists")
    if code == "ConditionalRequestConflict" or (status == 409 and error.operation_name == "PutObject"):
        return Refused("race")
    if code == "NoSuchKey" and error.operation_name == "PutObject":  # Ceph, for concurrent puts of one key
        return Refused("race")
    if status == 501 and error.operation_name in ("PutObject", "CompleteMultipartUpload"):
        return Refused("unsupported")
    if code in _TEMPORARY:
        return BlobUnavailable(f"{url} is temporarily unavailable: {reason}")
    if code in _MISSING or status in (404, 416):
        return BlobNotFound(f"no blob {key}, or it ends before the requested range ({code})")
    if status >= 500 or status in (408, 429) or status == 0:
        return BlobUnavailable(f"{url} is temporarily unavailable: {reason}")
    return BlobMisconfigured(f"{url} rejects {error.operation_name}: {reason}")


_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Options of `s3://bucket/prefix?option=value&…`. Times are seconds, sizes bytes.

    `endpoint`: base URL of a server other than AWS. `region`; `profile`: a section of the AWS configuration files.
    `path_style`: bucket in the path instead of the host name; by default true if there is an endpoint.
    `connections`: size of the connection pool. `attempts`: tries per request, including the first.
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
        """Raises BlobMisconfigured, which names the invalid option."""
        if "@" in url or is_ambiguous(url) or ":" in urlsplit(url).netloc:
            raise BlobMisconfigured("s3: takes no credentials in the URL; set them as AWS_* variables or a profile")
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        values: dict[str, Any] = {"path_style": "true" if "endpoint" in options else "false", **options}
        types = {field.name: str(field.type) for field in fields(cls) if field.name not in ("bucket", "prefix")}
        for name, text in values.items():
            if name not in types:
                raise BlobMisconfigured(f"s3: {describe_option(name, text)} is not one of {', '.join(types)}")
            values[name] = _parse_option(name, text, types[name])
        return cls(bucket=parts.netloc, prefix=unquote(parts.path).strip("/"), **values)

    def options(self) -> dict[str, str | None]:
        """The options that identify the data (none of them is secret)."""
        options: dict[str, str | None] = {"endpoint": self.endpoint, "region": self.region}
        if self.path_style != (self.endpoint is not None):
            options["path_style"] = str(self.path_style).lower()
        return options


def _parse_option(name: str, text: str, type_name: str) -> Any:
    try:
        if type_name == "bool":
            return _BOOLEANS[text.lower()]
        if type_name == "int":
            return int(text)
        if type_name == "float":
            return float(text)
    except (KeyError, ValueError):
        raise BlobMisconfigured(f"s3: option {name} must be a {type_name}") from None
    return text


MULTIPART_BYTES = 32 * 2**20  # a longer blob is uploaded in parts
PART_BYTES = 16 * 2**20  # of a part, which S3 requires to have at least 5 MiB
RANGE_BYTES = 8 * 2**20  # a longer range is read by several parallel requests of about this size
DELETE_BATCH = 1_000  # keys per DeleteObjects call: S3's limit
LIST_PAGE = 1_000  # keys per ListObjectsV2 call: S3's limit
BODY_ATTEMPTS_MAX = 3  # how often a download with an interrupted body is tried; boto3 retries only earlier failures
PUT_ATTEMPTS_MAX = 3  # how often a put that conflicts with a concurrent put of the same key (409) is tried
UPLOAD_THREADS = 4  # parts of multipart uploads in flight
READ_THREADS = 32  # pieces of long ranges in flight for all readers together, in addition to the first piece of each

T = TypeVar("T")

_log = logging.getLogger(__name__)


class S3Blob(Blob):
    """A bucket and a prefix. Credentials come from boto3's default chain."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._recent = RecentPuts(time.monotonic)
        self._pid = os.getpid()
        self._bucket = settings.bucket
        self._base = f"{settings.prefix}/" if settings.prefix else ""
        self._conditional = True
        self._enforces_write_once: bool | None = None  # whether the store refuses to overwrite; None: unknown
        self._upload_pool = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="blob-s3-upload")
        read_threads = min(READ_THREADS, settings.connections)
        self._read_pool = ThreadPoolExecutor(read_threads, thread_name_prefix="blob-s3-read")
        try:
            session = boto3.session.Session(profile_name=settings.profile, region_name=settings.region)
            self._boto_client = session.client("s3", endpoint_url=settings.endpoint, config=_config(settings))
        except (BotoCoreError, ValueError) as error:
            raise BlobMisconfigured(f"{self.url} cannot be opened: {error}") from error

    @property
    def _client(self) -> Any:
        check_process(self._pid, self.url)
        return self._boto_client

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
        check_key(key)
        body = bytes(data)
        self._put_new(key, body)
        self._recent.add(key, len(body))

    def put_here(self, key: str) -> int | None:
        return self._recent.size(key)

    def _put_new(self, key: str, body: bytes) -> None:
        for attempt in range(1, PUT_ATTEMPTS_MAX + 1):
            try:
                self._put_once(key, body)
                return
            except Refused as refused:
                if refused.reason == "unsupported":
                    _log.warning(
                        "%s does not support If-None-Match; each put first checks whether its key exists", self.url
                    )
                    self._conditional = False
                elif refused.reason == "exists":
                    self._confirm_same(key, body)
                    return
                elif attempt == PUT_ATTEMPTS_MAX:
                    raise BlobUnavailable(f"blob {key} is being written concurrently ({attempt} tries)") from refused
        raise BlobUnavailable(f"blob {key} could not be written in {PUT_ATTEMPTS_MAX} tries")

    def get(self, key: str) -> bytes:
        check_key(key)
        return self._download(key, None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        check_key(key)
        if length == 0:
            # HTTP has no empty range.
            stat = self.stat(key)
            if stat is None or stat.size < start:
                raise BlobNotFound(f"no blob {key} of at least {start} bytes")
            return b""
        pieces = max(1, round(length / RANGE_BYTES))
        if pieces == 1:
            return self._get_piece(key, start, start + length)
        # The rate of a connection is limited, so a long range uses several; this thread fetches the first piece.
        ends = [start + length * number // pieces for number in range(pieces + 1)]
        others = [self._read_pool.submit(self._get_piece, key, *bounds) for bounds in pairwise(ends[1:])]
        try:
            return b"".join([self._get_piece(key, ends[0], ends[1]), *(future.result() for future in others)])
        finally:
            for future in others:
                future.cancel()

    def _get_piece(self, key: str, start: int, end: int) -> bytes:
        data = self._download(key, f"bytes={start}-{end - 1}")
        if len(data) != end - start:
            raise BlobNotFound(f"blob {key} ends at byte {start + len(data)}, before {end}")
        return data

    def stat(self, key: str) -> BlobStat | None:
        name = self._name(check_key(key))
        try:
            head = self._call(key, lambda: self._client.head_object(Bucket=self._bucket, Key=name))
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
        return self._list_blobs(prefix)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Multipart uploads that were neither completed nor aborted. Needs `s3:ListBucketMultipartUploads`.

        If the server reports none below the prefix, all uploads are listed: MinIO accepts only a whole key as prefix.
        """
        start = self._name(check_prefix(prefix))
        for upload in list(self._list_uploads(Prefix=start)) or list(self._list_uploads()):
            if upload["Key"].startswith(start):
                where, begun_ms = upload["Key"].removeprefix(self._base), int(upload["Initiated"].timestamp() * 1000)
                yield Unfinished(f"{where} (upload)", -1, begun_ms, f"{upload['UploadId']} {upload['Key']}")

    def _list_uploads(self, **filters: str) -> Iterator[dict[str, Any]]:
        for page in self._pages("list_multipart_uploads", "", filters):
            yield from page.get("Uploads", [])

    def abandon(self, unfinished: Sequence[Unfinished]) -> None:
        for put in unfinished:
            upload, _, name = put.token.partition(" ")
            self._abort({"Bucket": self._bucket, "Key": name}, upload)

    def check(self) -> None:
        key = f"check/{os.urandom(8).hex()}"
        self.put(key, b"check")
        if self.get_range(key, 1, 3) != b"hec" or not any(blob.key == key for blob in self.list(key)):
            raise BlobMisconfigured(
                f"{self.url} does not return what was written to it; check that its endpoint is an S3 server"
            )
        self._enforces_write_once = self._refuses_overwrite(key)
        if not self._enforces_write_once:
            _log.warning(
                "%s ignores If-None-Match and does not prevent overwrites, so no URLs are signed for writes; clients "
                "send their parts through the server",
                self.url,
            )
        self.delete([key])

    def _refuses_overwrite(self, key: str) -> bool:
        """Whether the store refuses a put with `If-None-Match: *` of the existing blob `key`."""
        name = self._name(key)
        try:
            self._call(
                key, lambda: self._client.put_object(Bucket=self._bucket, Key=name, Body=b"other", IfNoneMatch="*")
            )
        except Refused as refused:
            return refused.reason == "exists"
        return False

    def _is_write_once(self) -> bool:
        """Whether the store refuses to overwrite, probed once."""
        if self._enforces_write_once is None:
            key = f"check/{os.urandom(8).hex()}"
            self.put(key, b"check")
            self._enforces_write_once = self._refuses_overwrite(key)
            self.delete([key])
        return self._enforces_write_once

    def close(self) -> None:
        self._upload_pool.shutdown()
        self._read_pool.shutdown()
        self._boto_client.close()

    def presign_get(self, key: str, expires_s: int) -> str | None:
        return self._presign("get_object", key, expires_s)

    def presign_put(self, key: str, expires_s: int) -> SignedPut | None:
        """`If-None-Match: *` is signed too, so the holder of the URL cannot write the key twice."""
        check_key(key)
        if not self._is_write_once():
            return None
        return SignedPut(self._presign("put_object", key, expires_s, IfNoneMatch="*"), {"If-None-Match": "*"})

    def _name(self, key: str) -> str:
        return self._base + key

    def _delete_batch(self, names: Sequence[str]) -> None:
        batch = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        response = self._call("", lambda: self._client.delete_objects(Bucket=self._bucket, Delete=batch))
        for failure in response.get("Errors", []):
            if failure.get("Code") != "NoSuchKey":
                reason = f"{failure.get('Code')} {failure.get('Message', '')}"
                raise BlobUnavailable(f"blob {failure.get('Key')} was not deleted: {reason}; delete it again")

    def _presign(self, operation: str, key: str, expires_s: int, **condition: str) -> str:
        parameters = {"Bucket": self._bucket, "Key": self._name(check_key(key)), **condition}
        sign = self._client.generate_presigned_url
        url: str = self._call(key, lambda: sign(operation, Params=parameters, ExpiresIn=expires_s))
        return url

    def _put_once(self, key: str, body: bytes) -> None:
        is_large = len(body) > MULTIPART_BYTES
        # Some servers ignore the condition when a multipart upload completes.
        if (is_large or not self._conditional) and self.stat(key) is not None:
            raise Refused("exists")
        target = {"Bucket": self._bucket, "Key": self._name(key)}
        condition = {"IfNoneMatch": "*"} if self._conditional else {}
        if is_large:
            self._put_parts(key, body, target, condition)
        else:
            self._call(key, lambda: self._client.put_object(**target, Body=body, **condition))

    def _put_parts(self, key: str, body: bytes, target: dict[str, str], condition: dict[str, str]) -> None:
        client = self._client
        upload = self._call(key, lambda: client.create_multipart_upload(**target)["UploadId"])
        view = memoryview(body)

        def send(number: int) -> dict[str, Any]:
            piece = bytes(view[(number - 1) * PART_BYTES : number * PART_BYTES])
            part = self._call(key, lambda: client.upload_part(**target, UploadId=upload, PartNumber=number, Body=piece))
            return {"PartNumber": number, "ETag": part["ETag"]}

        try:
            parts_count = -(-len(body) // PART_BYTES)
            sending = [self._upload_pool.submit(send, number) for number in range(1, parts_count + 1)]
            # All must end before an abort: a part that arrives later would survive it.
            wait(sending)
            completion = {"MultipartUpload": {"Parts": [future.result() for future in sending]}, **condition}
            self._call(key, lambda: client.complete_multipart_upload(**target, UploadId=upload, **completion))
        except (BlobError, Refused):
            self._abort(target, upload)
            raise

    def _abort(self, target: dict[str, str], upload: str) -> None:
        try:
            self._client.abort_multipart_upload(**target, UploadId=upload)
        except (BotoCoreError, ClientError) as error:
            _log.warning(
                "the parts of %s remain until the bucket's lifecycle rule deletes them: %s", target["Key"], error
            )

    def _confirm_same(self, key: str, body: bytes) -> None:
        stat = self.stat(key)
        if stat is None:
            raise BlobUnavailable(f"blob {key} existed and was deleted meanwhile; put it again")
        if stat.size != len(body) or self.get(key) != body:
            raise BlobExists(f"blob {key} exists with other bytes; keys are single-use")

    def _download(self, key: str, byte_range: str | None) -> bytes:
        name = self._name(key)
        headers = {} if byte_range is None else {"Range": byte_range}

        def fetch() -> bytes:
            with self._client.get_object(Bucket=self._bucket, Key=name, **headers)["Body"] as body:
                data: bytes = body.read()
                return data

        for attempt in range(1, BODY_ATTEMPTS_MAX + 1):
            try:
                return self._call(key, fetch)
            except BlobUnavailable as error:
                # Retry only an interrupted body: boto3 has already retried earlier failures.
                if attempt == BODY_ATTEMPTS_MAX or isinstance(error.__cause__, ClientError):
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _list_blobs(self, prefix: str) -> Iterator[BlobStat]:
        filters = {"Prefix": self._name(prefix), "PaginationConfig": {"PageSize": LIST_PAGE}}
        for page in self._pages("list_objects_v2", prefix, filters):
            for blob in page.get("Contents", []):
                modified_ms = int(blob["LastModified"].timestamp() * 1000)
                yield BlobStat(blob["Key"][len(self._base) :], blob["Size"], modified_ms)

    def _pages(self, operation: str, prefix: str, filters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        pages = iter(self._client.get_paginator(operation).paginate(Bucket=self._bucket, **filters))
        while (page := self._call(prefix, lambda: next(pages, None))) is not None:
            yield page

    def _call(self, key: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            failure = translate(error, key, self.url)
            if failure is None:
                raise
            raise failure from error


def own_endpoint(region: str | None) -> str:
    """The default endpoint of boto3: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the AWS files, or AWS in the region.

    Sends no request. Raises BlobMisconfigured.
    """
    try:
        session = boto3.session.Session(region_name=region)
        # Dummy credentials keep boto3 from searching for real ones.
        client = session.client("s3", aws_access_key_id="none", aws_secret_access_key="none")
    except (BotoCoreError, ValueError) as error:
        raise BlobMisconfigured(f"boto3 cannot be used here: {error}") from error
    endpoint = str(client.meta.endpoint_url)
    client.close()
    return endpoint


def _config(settings: S3Settings) -> Config:
    # Servers other than AWS often do not support the newer checksums, and every part has its own.
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
