"""The file of quotas: how much each token, and all shards under a prefix, may use. It is read again when it changes.

    {"ask": "ops@example.org",
     "default": {"requests_per_s": 100},
     "tokens": {"etl": {"requests_per_s": null, "rows_per_s": 100000}},
     "prefixes": {"eu/": {"shards": 200, "bytes": 1099511627776}}}

`default` is for each token; a token's own entry says what differs, and `null` is no limit. What is not named has none.
Tokens have rates, prefixes have counts.
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
COUNTS = ("shards", "bytes")  # of what is there under a prefix
ASK = "who runs this server"
ENTRIES_MAX = 10_000  # tokens, and prefixes
FILE_BYTES_MAX = 16 * 1024 * 1024
QUOTA_MAX = 2**53  # that every JSON reader takes as it is
ASK_CHARS_MAX = 200
PREFIX_CHARS_MAX = 257
_TOKEN = re.compile(r"[A-Za-z0-9-]{1,64}\Z")
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,128}(/[A-Za-z0-9._-]{0,128})?\Z")
_FIELDS = ("ask", "default", "tokens", "prefixes")
_log = logging.getLogger("persist.rpc")
Limits = Mapping[str, "int | None"]  # by the name of a quota; None, or left out: no limit


@dataclass(frozen=True)
class Rules:
    """What a file of quotas says."""

    ask: str = ASK
    default: Limits = field(default_factory=dict)
    tokens: Mapping[str, Limits] = field(default_factory=dict)
    prefixes: Mapping[str, Limits] = field(default_factory=dict)

    def of_token(self, name: str) -> dict[str, int]:
        """The quotas of a token, without those that are no limit."""
        told = {**self.default, **self.tokens.get(name, {})}
        return {quota: most for quota, most in told.items() if most is not None}

    def of_prefix(self, prefix: str) -> dict[str, int]:
        """The quotas of all shards under a prefix together."""
        return {quota: most for quota, most in self.prefixes[prefix].items() if most is not None}


class QuotaFile:
    """The rules of a file, which is read again when it changes. While it cannot be read, the rules before it hold.

    Making one raises InvalidUsage where the file cannot be read, or has quotas of tokens and the server `has_tokens`
    not, so that they would bind nobody. Later there is a warning of them. Used from the event loop's thread.
    """

    def __init__(self, path: str, now_s: Callable[[], float], *, has_tokens: bool = True) -> None:
        self._path = path
        self._has_tokens = has_tokens
        self._file = ChangedFiles([path], now_s)
        self.rules = read(path)
        self.unreadable = ""  # what is wrong with the file now
        if self._binds_nobody:
            raise InvalidUsage(
                f"the quotas file {path} has quotas of tokens, and this server knows no token: "
                "give --tokens FILE, or quotas of prefixes alone"
            )

    @property
    def _binds_nobody(self) -> bool:
        """Whether some of the quotas are those of tokens, which there are none of."""
        return not self._has_tokens and bool(self.rules.tokens or self.rules.default)

    def look(self) -> bool:
        """Read the file again if it has changed; whether its rules did."""
        if not self._file.look():
            return False
        before = self.rules
        try:
            self.rules, self.unreadable = read(self._path), ""
        except InvalidUsage as error:
            self._file.again()  # it may have been out of reach for now
            if str(error) != self.unreadable:
                _log.error("the file of quotas is bad: the quotas before it hold", extra={"why": str(error)[:500]})
            self.unreadable = str(error)
        if self.rules != before and self._binds_nobody:
            _log.warning("the file of quotas has quotas of tokens, which bind nobody: this server knows no token")
        return self.rules != before


def quota_file_of(settings: ServerSettings, now_s: Callable[[], float]) -> QuotaFile | None:
    """That of a server; None: it has none. Raises InvalidUsage."""
    if settings.quotas is None:
        return None
    return QuotaFile(settings.quotas, now_s, has_tokens=settings.tokens_file is not None)


def read(path: str) -> Rules:
    """The rules of a file. Raises InvalidUsage."""
    return rules_of(read_bounded(f"the quotas file {path}", path, FILE_BYTES_MAX, own=True), path)


def rules_of(data: bytes, path: str) -> Rules:
    """The rules in the content of a file. Raises InvalidUsage naming what is wrong in it."""
    try:
        found = json.loads(data, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"the quotas file {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidUsage(f'the quotas file {path} is not of the form {{"tokens": {{…}}}}')
    if unknown := sorted(found.keys() - set(_FIELDS)):
        raise InvalidUsage(f"the quotas file {path} has {unknown[0]!r:.80}; it may have {', '.join(_FIELDS)}")
    ask = found.get("ask", ASK)
    if not isinstance(ask, str) or not 0 < len(ask) <= ASK_CHARS_MAX or not ask.isprintable():
        raise InvalidUsage(f"ask in {path} must be a text of at most {ASK_CHARS_MAX} characters")
    tokens = _entries(found.get("tokens", {}), "tokens", path, RATES)
    prefixes = _entries(found.get("prefixes", {}), "prefixes", path, COUNTS)
    for name in tokens:
        check_token(name, path)
    for prefix in prefixes:
        check_prefix(prefix, path)
    return Rules(ask, _limits(found.get("default", {}), f"default in {path}", RATES), tokens, prefixes)


def check_token(name: str, place: str) -> None:
    """Raises InvalidUsage where no token is called so."""
    if not _TOKEN.match(name):
        raise InvalidUsage(f"{name!r:.100} in {place} is no id of a token: 1 to 64 letters, digits and '-'")


def check_prefix(prefix: str, place: str) -> None:
    """Raises InvalidUsage where no shard's name begins so."""
    if not _PREFIX.match(prefix) or len(prefix) > PREFIX_CHARS_MAX:
        raise InvalidUsage(f"{prefix!r:.100} in {place} is no prefix of the names of shards")


def check_quota(quota: str, most: object, place: str, known: tuple[str, ...]) -> int | None:
    """The most that a quota allows; None: no limit. `known`: which there are here. Raises InvalidUsage."""
    if quota not in known:
        raise InvalidUsage(f"{place} has the quota {quota!r:.80}; there it can be {', '.join(known)}")
    least = 1 if quota in RATES else 0
    if most is None:
        return None
    if type(most) is not int or not least <= most <= QUOTA_MAX:
        raise InvalidUsage(f"{quota} of {place} is {most!r:.80}; it must be a whole number from {least} on, or null")
    return most


def _entries(found: object, kind: str, path: str, known: tuple[str, ...]) -> dict[str, Limits]:
    if not isinstance(found, dict):
        raise InvalidUsage(f"{kind} in {path} must be an object of quotas by name")
    if len(found) > ENTRIES_MAX:
        raise InvalidUsage(f"{kind} in {path} are {len(found)}; at most {ENTRIES_MAX} are possible")
    return {name: _limits(given, f"{kind} {name!r:.100} in {path}", known) for name, given in found.items()}


def _limits(given: object, place: str, known: tuple[str, ...]) -> Limits:
    if not isinstance(given, dict):
        raise InvalidUsage(f'{place} must be an object such as {{"{known[0]}": 100}}')
    return {quota: check_quota(quota, most, place, known) for quota, most in given.items()}
