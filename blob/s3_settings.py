"""What an `s3:` location says: bucket, prefix and options."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from blob.errors import BlobMisconfigured
from blob.secrets import is_ambiguous, option_said

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Options of `s3://bucket/prefix?option=value&…`. Times are seconds, sizes bytes.

    `endpoint`: base URL of a server that is not AWS's. `region`; `profile`: a section of the AWS files.
    `path_style`: bucket in the path and not in the host name; by default exactly with an endpoint.
    `connections`: size of the connection pool. `attempts`: tries per request, the first included.
    `range_bytes`: a longer range is read by several requests at the same time, of about so many bytes each.
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
    multipart_bytes: int = 32 * 2**20
    part_bytes: int = 16 * 2**20
    range_bytes: int = 8 * 2**20

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
        for name in ("connections", "attempts", "multipart_bytes", "connect_timeout", "read_timeout", "range_bytes"):
            if getattr(self, name) <= 0:
                raise BlobMisconfigured(f"s3: option {name} must be greater than 0")
        if self.part_bytes < 5 * 2**20:
            raise BlobMisconfigured("s3: option part_bytes must be at least 5242880: S3 takes no smaller parts")

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
