"""Opens a blob store from its location URL."""

from __future__ import annotations

from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from blob.cache import CachedBlob
from blob.errors import BlobMisconfigured, is_ambiguous, optional, without_secrets
from blob.file import FileBlob
from blob.interface import Blob
from blob.memory_blobs import MemoryBlob, NamedStores

CACHE_MB_MAX = 2**20

_memory = NamedStores(MemoryBlob, "blob", BlobMisconfigured)


def open_blob(url: str, *, makes: bool = True) -> Blob:
    """Open the blob store at `url`; BlobMisconfigured says what is wrong with it.

    `mem:` (private), `mem:name` (shared in this process), `file:///dir`, `s3://bucket/prefix?endpoint=…`,
    `gs://bucket/prefix`, `abfs://container@account.dfs.core.windows.net/prefix`, `hdfs://host:port/prefix`.
    With the option `cache_mb=N` any of them caches up to N MiB of the bytes that it reads in memory (`blob.cache`).
    No service is contacted; call `check()` to probe the store. With `makes` a missing `file:` directory is created,
    without it (for read-only tools) it is BlobMisconfigured.
    """
    url, cache_bytes = _split_cache_option(url)
    store = _open(url, makes)
    return CachedBlob(store, cache_bytes) if cache_bytes else store


def may_exist(url: str) -> bool:
    """False if `url` names a directory that does not exist, else True. Contacts no service."""
    url, _ = _split_cache_option(url)
    return url.partition(":")[0].lower() != "file" or _file_root(url).is_dir()


def _split_cache_option(url: str) -> tuple[str, int]:
    """The URL without the option `cache_mb`, and the size of the cache in bytes (0: none)."""
    base, _, query = url.partition("?")
    rest, size = [], 0
    for option in query.split("&"):
        name, _, text = option.partition("=")
        if name != "cache_mb":
            rest.append(option)
        elif text.isascii() and text.isdecimal() and 0 < int(text) <= CACHE_MB_MAX:
            size = int(text) * 2**20
        else:
            raise BlobMisconfigured(f"blob option cache_mb must be 1 to {CACHE_MB_MAX} (MiB)")
    return "?".join(filter(None, (base, "&".join(rest)))), size


def _open(url: str, makes: bool) -> Blob:
    scheme = url.partition(":")[0].lower()
    if scheme == "mem":
        return _memory.open(url)
    if scheme == "file":
        return FileBlob(_file_root(url), makes=makes)
    if scheme == "s3":
        store = optional("blob.s3", "s3:", "persist-shards[s3]", BlobMisconfigured).S3Blob.from_url(url)
        return cast(Blob, store)
    if scheme in ("gs", "abfs", "abfss", "hdfs"):
        from blob.arrow_fs import ArrowFsBlob

        return ArrowFsBlob.from_url(url)
    rule = "must start with mem: file: s3: gs: abfs: or hdfs:"
    if "://" not in url:
        rule += "; a directory is written file:///path"
    raise BlobMisconfigured(f"blob location {without_secrets(url)!r} {rule}")


def _file_root(url: str) -> Path:
    if is_ambiguous(url):
        raise BlobMisconfigured(f"blob location {without_secrets(url)!r} must be file:///absolute/directory")
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.path == "/":
        raise BlobMisconfigured(f"blob location {without_secrets(url)!r} must be file:///absolute/directory")
    if parts.query or parts.fragment:
        raise BlobMisconfigured(f"blob location {without_secrets(url)!r}: file: takes no options")
    return Path(unquote(parts.path))
