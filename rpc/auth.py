"""Bearer tokens: format, storage, scopes, expiry, and request counts by token."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import logging
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from persist.check.location_checks import TokenSeen
from persist.client.arguments import OTHERS_WRITE, read_with_mode
from persist.core.commands import ADMIN, INCLUDED, MAINTAIN, MANAGE, READ, SCOPES, WRITE
from persist.core.errors import Forbidden, InvalidUsage, Unauthorized
from persist.formats.exposition import COUNTER, Family, Labelled
from persist.formats.http_messages import named_once
from rpc.tls import ChangedFiles, Peer, checked_name

# Bearer tokens: what they are, how they are kept, and what each lets its bearer do.
#
# A token is `pt_<id>_<secret>`. The tokens file holds only the SHA-256 of it (the secret has 256 random bits, so
# nothing is gained by a slow hash), its scopes, the prefixes of shard names it is good for, and when it ends:
#
#     {"tokens": [{"id": "etl", "sha256": "…", "scopes": ["write"], "prefixes": ["eu/"], "expires": "2030-01-01"}]}
#
# Instead of a hash, or beside it, an entry may name the `certificate` of a client: `DNS:etl.internal`,
# `URI:spiffe://…`, `email:…`, `IP:…` or `subject:CN=etl,O=Example`. Who shows one with that name in a TLS connection
# needs no token.
#
# The file is read again when it changes: adding a token, and removing one, need no restart.


_log = logging.getLogger("persist.rpc")
TOKENS_MAX = 10_000
FILE_BYTES_MAX = 16 * 1024 * 1024
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR, errno.EAGAIN})  # of a read
_TOKEN = re.compile(r"pt_([A-Za-z0-9-]{1,64})_([A-Za-z0-9_-]{20,200})\Z")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. `scopes` has those too that its own ones include; no prefixes means every shard."""

    name: str
    scopes: frozenset[str]
    prefixes: tuple[str, ...] = ()
    expires_s: float | None = None

    @property
    def is_unlimited(self) -> bool:
        """Whether every shard is open to it."""
        return not self.prefixes

    def sees(self, shard: str) -> bool:
        return not self.prefixes or shard.startswith(self.prefixes)

    def require(self, scope: str, shard: str | None = None) -> None:
        """Raises Forbidden unless this principal has the scope, on this shard."""
        self.require_any((scope,), shard)

    def require_any(self, scopes: tuple[str, ...], shard: str | None = None) -> None:
        """Raises Forbidden unless this principal has one of the scopes, on this shard."""
        if self.scopes.isdisjoint(scopes):
            wanted = " or ".join(repr(scope) for scope in scopes)
            raise Forbidden(f"the token {self.name!r} has no scope {wanted}; ask for one that has it")
        if shard is not None:
            self.require_shard(shard)

    def require_shard(self, shard: str) -> None:
        """Raises Forbidden unless this shard is open to it, whatever for."""
        if not self.sees(shard):
            raise Forbidden(f"the token {self.name!r} is not good for shard {shard!r}; ask for one that is")

    def require_prefix(self, prefix: str) -> None:
        """Raises Forbidden unless all names that begin with this prefix are open to it."""
        if not self.is_unlimited and not prefix.startswith(self.prefixes):
            raise Forbidden(
                f"the token {self.name!r} may list names with the prefixes {list(self.prefixes)} only: "
                "give one of them as the prefix"
            )


ANYBODY = Principal("anybody", frozenset(SCOPES))
STRANGER = Principal("anybody", frozenset())
"""Who asks for what is open to everybody, of a server that wants tokens."""
MAINTENANCE = Principal("maintenance", INCLUDED[MAINTAIN])


def has_token(principal: Principal) -> bool:
    """Whether it gave a token, so that it is known who asks."""
    return principal is not ANYBODY and principal is not STRANGER


def maintenance_token() -> str:
    """A token for the maintenance that a server starts beside itself; it is good until that server ends."""
    return f"pt_maintenance_{secrets.token_urlsafe(32)}"


@dataclass(frozen=True, slots=True)
class KnownToken:
    """An entry of the file: whose it is, and the hash of the token, or the name of the certificate, that shows it."""

    principal: Principal
    digest: bytes | None
    certificate: str | None


class Tokens:
    """The tokens of a file, which is read again when it changes, and `own`, the server's for itself. Thread-safe.

    Making one raises InvalidUsage where the file cannot be read. Later such a file lets nobody in.
    """

    def __init__(self, path: str, *, now_s: Callable[[], float], own: str | None = None) -> None:
        self._path = path
        self._own = None if own is None else hashlib.sha256(own.encode()).digest()
        self._now_s = now_s
        self._lock = threading.Lock()
        self._file = ChangedFiles([path], now_s)
        self._is_broken = False
        self._by_id: dict[str, KnownToken] = {}
        self._by_certificate: dict[str, KnownToken] = {}
        self._take(_read(path))

    def ending(self) -> list[Principal]:
        """Those of the tokens that end."""
        self._look()
        return _ending(self._by_id)

    def principal(self, authorization: str | None, peer: Peer | None = None) -> Principal:
        """Who sends this Authorization header, or, where it sends none, has shown a certificate.

        Raises Unauthorized, without saying what was wrong with the secret.
        """
        self._look()
        if authorization is None and peer is not None:
            return self._in_time(self._of_certificate(peer))
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise Unauthorized(
                "this server wants a token: send the header Authorization: Bearer pt_… (in Python give token=…, to a "
                "command the variable PERSIST_TOKEN)"
            )
        match = _TOKEN.match(token.strip())
        given = hashlib.sha256(token.strip().encode()).digest()
        if self._own is not None and hmac.compare_digest(given, self._own):
            return MAINTENANCE
        known = self._by_id.get(match.group(1)) if match else None
        # A comparison is made either way, so that the time taken does not tell which ids exist.
        expected = bytes(32) if known is None or known.digest is None else known.digest
        if not hmac.compare_digest(given, expected) or known is None or known.digest is None:
            if self._is_broken:
                raise Unauthorized("nobody is let in here until the tokens file is mended: the server's log says how")
            raise Unauthorized("the token is not known here; it may have been replaced")
        return self._in_time(known.principal)

    def _of_certificate(self, peer: Peer) -> Principal:
        """Raises Unauthorized where it is not certain whose certificate that is."""
        if self._now_s() >= peer.until_s:
            raise Unauthorized("the client certificate of this connection has expired; connect with a new one")
        found = {id(known): known for name in peer.names if (known := self._by_certificate.get(name)) is not None}
        if len(found) != 1:
            why = "is not known here" if not found else "has names of several tokens"
            raise Unauthorized(f"the client certificate {why}: the tokens file is to name it, or send a token")
        principal = next(iter(found.values())).principal
        ends_s = peer.until_s if principal.expires_s is None else min(principal.expires_s, peer.until_s)
        return replace(principal, expires_s=ends_s)

    def _in_time(self, principal: Principal) -> Principal:
        if principal.expires_s is not None and self._now_s() >= principal.expires_s:
            raise Unauthorized(f"the token {principal.name!r} has expired; ask for a new one")
        return principal

    def _look(self) -> None:
        if self._file.is_due():
            with self._lock:
                if self._file.look():
                    self._reload()

    def _reload(self) -> None:
        try:
            found = _read(self._path)
        except InvalidUsage as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _PASSING:
                _log.warning("the tokens that were known hold on, and the file is read again: %s", error.message)
                self._file.again()
                return
            _log.warning("nobody is let in by a token until this is mended: %s", error.message)
            self._is_broken, found = True, {}
        else:
            self._is_broken = False
        self._take(found)

    def _take(self, found: dict[str, KnownToken]) -> None:
        self._by_certificate = {one.certificate: one for one in found.values() if one.certificate is not None}
        self._by_id = found


def read_ending(path: str) -> list[Principal]:
    """Those of the tokens of a file that end. Raises InvalidUsage."""
    return _ending(_read(path))


def _ending(known: dict[str, KnownToken]) -> list[Principal]:
    return [one.principal for one in known.values() if one.principal.expires_s is not None]


def _read(path: str) -> dict[str, KnownToken]:
    try:
        data = tokens_read(path)
    except FileNotFoundError as error:
        raise InvalidUsage(f"the tokens file {path} cannot be read: {error.strerror}") from error
    return known_of(data, path)


def tokens_read(path: str) -> bytes:
    """The bytes of a tokens file. Raises FileNotFoundError, and InvalidUsage: it cannot be read, or is refused.

    Who may write it may mint tokens: such a file is refused where that is anybody but its owner.
    """
    try:
        data, mode = read_with_mode(path, FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidUsage(f"the tokens file {path} cannot be read: {error.strerror}") from error
    if mode & OTHERS_WRITE:
        raise InvalidUsage(
            f"the tokens file {path} has the mode {mode:04o}, so others may write it and let themselves in: look at "
            f"what it holds, then run chmod go-w {path}"
        )
    return data


def known_of(data: bytes, path: str) -> dict[str, KnownToken]:
    """The tokens in the content of a file, by their ids. Raises InvalidUsage."""
    try:
        if len(data) > FILE_BYTES_MAX:
            raise InvalidUsage(f"the tokens file {path} is longer than {FILE_BYTES_MAX} bytes")
        entries = json.loads(data, object_pairs_hook=named_once)["tokens"]
        if not isinstance(entries, list) or len(entries) > TOKENS_MAX:
            raise InvalidUsage(f"the tokens file {path} must hold a list of at most {TOKENS_MAX} tokens")
        read = dict(_entry(entry, number, path) for number, entry in enumerate(entries))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidUsage(f'the tokens file {path} is not of the form {{"tokens": […]}}: {error}') from error
    if len(read) != len(entries):
        raise InvalidUsage(f"the tokens file {path} holds an id twice")
    certificates = [one.certificate for one in read.values() if one.certificate is not None]
    if len(set(certificates)) != len(certificates):
        raise InvalidUsage(f"the tokens file {path} holds a certificate twice")
    return read


def _entry(entry: dict[str, Any], number: int, path: str) -> tuple[str, KnownToken]:
    place = f"token {number} of {path}"
    try:
        name, certificate = str(entry["id"]), entry.get("certificate")
        certificate = None if certificate is None else checked_name(certificate)
        digest = None if certificate is not None and "sha256" not in entry else bytes.fromhex(entry["sha256"])
        scopes, prefixes = _texts(entry["scopes"]), tuple(_texts(entry.get("prefixes", [])))
        expires = entry.get("expires")
        until = None if expires is None else expiry_of(expires)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidUsage(
            f"{place} needs id, sha256 or certificate, scopes; and prefixes, expires if any: {error}"
        ) from error
    if (digest is not None and len(digest) != 32) or not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name):
        raise InvalidUsage(f"{place} needs an id of letters, digits and '-', and the SHA-256 of the token in hex")
    if not scopes or not set(scopes) <= set(SCOPES) or not all(prefixes):
        raise InvalidUsage(f"{place} needs scopes out of {', '.join(SCOPES)}, and prefixes that are not empty")
    expires_s = None if until is None else until.timestamp()
    included: frozenset[str] = frozenset().union(*(INCLUDED[one] for one in scopes))
    return name, KnownToken(Principal(name, included, prefixes, expires_s), digest, certificate)


def expiry_of(text: str) -> datetime:
    """When a token ends: UTC, where the text names no zone. Raises ValueError, TypeError: it is no date or time."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _texts(value: object) -> list[str]:
    """A list of texts. One text alone is none: its letters would be taken for prefixes. Raises TypeError."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"scopes and prefixes are lists of texts, not {value!r:.100}")
    return value


def mint(name: str) -> tuple[str, str]:
    """A fresh token of that id, and the SHA-256 to keep of it."""
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name):
        raise InvalidUsage(f"a token's id is 1 to 64 letters, digits and '-', not {name!r}")
    token = f"pt_{name}_{secrets.token_urlsafe(32)}"
    return token, hashlib.sha256(token.encode()).hexdigest()


# Tokens that end, as the check sees them.


_WIDEST_FIRST = (ADMIN, MANAGE, WRITE, MAINTAIN, READ)


def tokens_seen(ending: Iterable[Principal]) -> list[TokenSeen]:
    """What the check needs of them, in the order of their ids."""
    found = []
    for one in sorted(ending, key=lambda one: one.name):
        assert one.expires_s is not None
        scope = next(scope for scope in _WIDEST_FIRST if scope in one.scopes)
        found.append(TokenSeen(one.name, int(one.expires_s * 1000), scope, one.prefixes))
    return found


# Requests, bytes and refusals by the id of the token that asked, for a bounded number of tokens.


COUNTED_TOKENS_MAX = 100  # with series of their own; the rest are OTHER
# The labels of who is no token of the file. No id has an underscore, so that nobody's token is counted with them.
OTHER = "_other"
NOBODY = "_unknown"  # who gave no token that is known here
_OWN = ((ANYBODY, "_anybody"), (STRANGER, "_anybody"), (MAINTENANCE, "_maintenance"))


def label_of(principal: Principal | None) -> str:
    """Under which label a caller is counted; None: nobody who is known here."""
    if principal is None:
        return NOBODY
    return next((label for own, label in _OWN if principal is own), principal.name)


class TokenFigures:
    """Counts of each token. All methods but `families` belong to the event loop's thread."""

    def __init__(self, tokens_max: int = COUNTED_TOKENS_MAX) -> None:
        self._most = tokens_max
        self._known: dict[str, str] = {}
        self._requests: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()

    def observe(self, token: str, received: int, sent: int) -> None:
        """Count a request and the bytes of its body and of its answer's."""
        token = self._known.get(token) or self._named(token)
        self._requests[token] += 1
        self._received[token] += received
        self._sent[token] += sent

    def refused(self, token: str, kind: str) -> None:
        """Count a refusal, or a failure, by the kind of its error."""
        self._refused[self._known.get(token) or self._named(token), kind] += 1

    def families(self, only: str | None) -> Iterator[Family]:
        """All of it; `only`: of one token."""

        def shown(token: str) -> bool:
            return only is None or token == only

        requests: list[Labelled] = [((name,), n) for name, n in list(self._requests.items()) if shown(name)]
        moved: list[Labelled] = []
        for direction, counts in (("in", self._received), ("out", self._sent)):
            moved += [((name, direction), n) for name, n in list(counts.items()) if shown(name)]
        refused: list[Labelled] = [(key, n) for key, n in list(self._refused.items()) if shown(key[0])]
        yield Family("persist_token_requests_total", COUNTER, "Requests by token", ("token",), requests)
        yield Family("persist_token_bytes_total", COUNTER, "Bytes of bodies by token", ("token", "direction"), moved)
        yield Family(
            "persist_token_refusals_total", COUNTER, "Requests refused or failed by token", ("token", "kind"), refused
        )

    def _named(self, token: str) -> str:
        if len(self._known) >= self._most:
            return OTHER
        self._known[token] = token
        return token
