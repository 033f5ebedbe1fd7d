"""The quotas file: limits for each token and for all shards under a prefix. It is reloaded when it changes.

    {"ask": "ops@example.org",
     "default": {"requests_per_s": 100},
     "tokens": {"etl": {"requests_per_s": null, "rows_per_s": 100000}},
     "prefixes": {"eu/": {"shards": 200, "bytes": 1099511627776}}}

`default` applies to each token; an entry of a token overrides it, and `null` means no limit. Tokens have rates,
prefixes have counts.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from persist.client.arguments import read_bounded
from persist.core.errors import InvalidUsage
from persist.formats.http_messages import named_once
from rpc.settings import ServerSettings
from rpc.tls import ChangedFiles

RATES = ("requests_per_s", "rows_per_s")  # of a token, at one server
COUNTS = ("shards", "bytes")  # under a prefix
ASK = "the operator of this server"
ENTRIES_MAX = 10_000  # tokens, and prefixes
FILE_BYTES_MAX = 16 * 1024 * 1024
QUOTA_MAX = 2**53  # the largest integer that every JSON reader keeps exactly
ASK_CHARS_MAX = 200
PREFIX_CHARS_MAX = 257
_TOKEN = re.compile(r"[A-Za-z0-9-]{1,64}\Z")
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,128}(/[A-Za-z0-9._-]{0,128})?\Z")
_FIELDS = ("ask", "default", "tokens", "prefixes")
_log = logging.getLogger("persist.rpc")
Limits = Mapping[str, "int | None"]  # by the name of a quota; None or absent: no limit


@dataclass(frozen=True)
class Rules:
    """The content of a quotas file."""

    ask: str = ASK
    default: Limits = field(default_factory=dict)
    tokens: Mapping[str, Limits] = field(default_factory=dict)
    prefixes: Mapping[str, Limits] = field(default_factory=dict)

    def of_token(self, name: str) -> dict[str, int]:
        """The limits of a token."""
        limits = {**self.default, **self.tokens.get(name, {})}
        return {quota: most for quota, most in limits.items() if most is not None}

    def of_prefix(self, prefix: str) -> dict[str, int]:
        """The limits of all shards under a prefix together."""
        return {quota: most for quota, most in self.prefixes[prefix].items() if most is not None}


class QuotaFile:
    """The rules of a file, which is reloaded when it changes. While it is invalid, the previous rules apply.

    The constructor raises InvalidUsage if the file is invalid, or limits tokens at a server without tokens
    (`has_tokens`); after a reload this is logged. Used from the event loop's thread.
    """

    def __init__(self, path: str, now_s: Callable[[], float], *, has_tokens: bool = True) -> None:
        self._path = path
        self._has_tokens = has_tokens
        self._file = ChangedFiles([path], now_s)
        self.rules = read(path)
        self.unreadable = ""  # why the file is invalid now
        if self._limits_no_token:
            raise InvalidUsage(
                f"the quotas file {path} limits tokens, but this server has none: "
                "give --tokens FILE, or quotas of prefixes alone"
            )

    @property
    def _limits_no_token(self) -> bool:
        """Whether the rules limit tokens although there are none."""
        return not self._has_tokens and bool(self.rules.tokens or self.rules.default)

    def reload(self) -> bool:
        """Reload the file if it has changed; returns whether its rules changed."""
        if not self._file.look():
            return False
        before = self.rules
        try:
            self.rules, self.unreadable = read(self._path), ""
        except InvalidUsage as error:
            self._file.again()  # the cause may be temporary
            if str(error) != self.unreadable:
                _log.error("the quotas file is invalid; the previous quotas apply", extra={"why": str(error)[:500]})
            self.unreadable = str(error)
        if self.rules != before and self._limits_no_token:
            _log.warning("the quotas file limits tokens, but this server has none")
        return self.rules != before


def quota_file_of(settings: ServerSettings, now_s: Callable[[], float]) -> QuotaFile | None:
    """The quotas file of a server; None: it has none. Raises InvalidUsage."""
    if settings.quotas is None:
        return None
    return QuotaFile(settings.quotas, now_s, has_tokens=settings.tokens_file is not None)


def read(path: str) -> Rules:
    """The rules in a file. Raises InvalidUsage."""
    return rules_of(read_bounded(f"the quotas file {path}", path, FILE_BYTES_MAX, own=True), path)


def rules_of(data: bytes, path: str) -> Rules:
    """The rules in the content of a file. Raises InvalidUsage naming the invalid entry."""
    try:
        content = json.loads(data, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"the quotas file {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidUsage(f'the quotas file {path} is not of the form {{"tokens": {{…}}}}')
    if unknown := sorted(content.keys() - set(_FIELDS)):
        raise InvalidUsage(f"the quotas file {path} has {unknown[0]!r:.80}; it may have {', '.join(_FIELDS)}")
    ask = content.get("ask", ASK)
    if not isinstance(ask, str) or not 0 < len(ask) <= ASK_CHARS_MAX or not ask.isprintable():
        raise InvalidUsage(f"ask in {path} must be a string of at most {ASK_CHARS_MAX} characters")
    tokens = _entries(content.get("tokens", {}), "tokens", path, RATES)
    prefixes = _entries(content.get("prefixes", {}), "prefixes", path, COUNTS)
    for name in tokens:
        if not _TOKEN.match(name):
            raise InvalidUsage(f"{name!r:.100} in {path} is not a token id: 1 to 64 letters, digits and '-'")
    for prefix in prefixes:
        if not _PREFIX.match(prefix) or len(prefix) > PREFIX_CHARS_MAX:
            raise InvalidUsage(f"{prefix!r:.100} in {path} is not a prefix of shard names")
    return Rules(ask, _limits(content.get("default", {}), f"default in {path}", RATES), tokens, prefixes)


def _quota(quota: str, most: object, place: str, known: tuple[str, ...]) -> int | None:
    """The limit of a quota out of `known`; None: no limit. Raises InvalidUsage."""
    if quota not in known:
        raise InvalidUsage(f"{place} has the quota {quota!r:.80}; it must be one of {', '.join(known)}")
    least = 1 if quota in RATES else 0
    if most is None:
        return None
    if type(most) is not int or not least <= most <= QUOTA_MAX:
        raise InvalidUsage(f"{quota} of {place} is {most!r:.80}; it must be an integer of at least {least}, or null")
    return most


def _entries(entries: object, kind: str, path: str, known: tuple[str, ...]) -> dict[str, Limits]:
    if not isinstance(entries, dict):
        raise InvalidUsage(f"{kind} in {path} must be an object of quotas by name")
    if len(entries) > ENTRIES_MAX:
        raise InvalidUsage(f"{kind} in {path} has {len(entries)} entries; at most {ENTRIES_MAX} are allowed")
    return {name: _limits(limits, f"{kind} {name!r:.100} in {path}", known) for name, limits in entries.items()}


def _limits(limits: object, place: str, known: tuple[str, ...]) -> Limits:
    if not isinstance(limits, dict):
        raise InvalidUsage(f'{place} must be an object such as {{"{known[0]}": 100}}')
    return {quota: _quota(quota, most, place, known) for quota, most in limits.items()}
