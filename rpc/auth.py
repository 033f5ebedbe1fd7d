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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from persist.check.location_checks import TokenFacts
from persist.client.arguments import OTHERS_WRITE, read_with_mode
from persist.core.commands import ADMIN, INCLUDED, MAINTAIN, MANAGE, READ, SCOPES, WRITE
from persist.core.errors import Forbidden, InvalidUsage, Unauthorized
from persist.formats.http_messages import named_once
from rpc.tls import ChangedFiles, Peer, checked_name

# A token is `pt_<id>_<secret>`. The tokens file holds its SHA-256 (a slow hash would add nothing to a secret of 256
# random bits), its scopes, the prefixes of shard names that it covers, and its expiry:
#
#     {"tokens": [{"id": "etl", "sha256": "…", "scopes": ["write"], "prefixes": ["eu/"], "expires": "2030-01-01"}]}
#
# An entry may also, or instead of a hash, name the `certificate` of a client: `DNS:etl.internal`, `URI:spiffe://…`,
# `email:…`, `IP:…` or `subject:CN=etl,O=Example`. A client that presents this certificate needs no token.
#
# The file is reloaded when it changes: adding or removing a token needs no restart.


_log = logging.getLogger("persist.rpc")
TOKENS_MAX = 10_000
FILE_BYTES_MAX = 16 * 1024 * 1024
_TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR, errno.EAGAIN})  # of a read
_TOKEN = re.compile(r"pt_([A-Za-z0-9-]{1,64})_([A-Za-z0-9_-]{20,200})\Z")


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `scopes` includes implied scopes; no prefixes means every shard."""

    name: str
    scopes: frozenset[str]
    prefixes: tuple[str, ...] = ()
    expires_s: float | None = None

    @property
    def is_unlimited(self) -> bool:
        """Whether it covers every shard."""
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
            raise Forbidden(f"the token {self.name!r} has no scope {wanted}; request one that has it")
        if shard is not None:
            self.require_shard(shard)

    def require_shard(self, shard: str) -> None:
        """Raises Forbidden unless this principal covers the shard, in any scope."""
        if not self.sees(shard):
            raise Forbidden(f"the token {self.name!r} does not cover shard {shard!r}; request one that does")

    def covers(self, prefix: str) -> bool:
        """Whether it covers all names with this prefix."""
        return self.is_unlimited or prefix.startswith(self.prefixes)

    def require_prefix(self, prefix: str) -> None:
        """Raises Forbidden unless this principal covers all names with this prefix."""
        if not self.covers(prefix):
            raise Forbidden(
                f"the token {self.name!r} may only list names with the prefixes {list(self.prefixes)}: "
                "pass one of them as the prefix"
            )


ANONYMOUS = Principal("anybody", frozenset(SCOPES))
UNAUTHENTICATED = Principal("anybody", frozenset())
"""A caller without a valid token, at a server with tokens: may request only public paths."""
MAINTENANCE = Principal("maintenance", INCLUDED[MAINTAIN])


def has_token(principal: Principal) -> bool:
    return principal is not ANONYMOUS and principal is not UNAUTHENTICATED


@dataclass(frozen=True, slots=True)
class KnownToken:
    """An entry of the file: the principal, and the hash of its token or the name of its certificate."""

    principal: Principal
    digest: bytes | None
    certificate: str | None


class Tokens:
    """The tokens of a file, which is reloaded when it changes, and `own`, the server's own token. Thread-safe.

    The constructor raises InvalidUsage if the file cannot be read. If that happens later, all tokens are rejected.
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
        self._take(read_tokens(path))

    def known(self) -> Mapping[str, KnownToken]:
        """The tokens of the file, by their ids."""
        self._reload_if_changed()
        return self._by_id

    def principal(self, authorization: str | None, peer: Peer | None = None) -> Principal:
        """The principal of this Authorization header or, without one, of the client certificate.

        Raises Unauthorized, without saying what was wrong with the secret.
        """
        self._reload_if_changed()
        if authorization is None and peer is not None:
            return self._in_time(self._of_certificate(peer))
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise Unauthorized(
                "this server requires a token: send the header Authorization: Bearer pt_… (in Python pass token=…, for "
                "commands set the variable PERSIST_TOKEN)"
            )
        match = _TOKEN.match(token.strip())
        digest = hashlib.sha256(token.strip().encode()).digest()
        if self._own is not None and hmac.compare_digest(digest, self._own):
            return MAINTENANCE
        known = self._by_id.get(match.group(1)) if match else None
        # Always compare, so that the duration does not reveal which ids exist.
        expected = bytes(32) if known is None or known.digest is None else known.digest
        if not hmac.compare_digest(digest, expected) or known is None or known.digest is None:
            if self._is_broken:
                raise Unauthorized("all tokens are rejected because the tokens file is invalid; see the server's log")
            raise Unauthorized("the token is unknown; it may have been replaced")
        return self._in_time(known.principal)

    def _of_certificate(self, peer: Peer) -> Principal:
        """Raises Unauthorized unless exactly one entry names the certificate."""
        if self._now_s() >= peer.until_s:
            raise Unauthorized("the client certificate of this connection has expired; connect with a new one")
        matches = {id(known): known for name in peer.names if (known := self._by_certificate.get(name)) is not None}
        if len(matches) != 1:
            why = "is unknown" if not matches else "has names of several tokens"
            raise Unauthorized(f"the client certificate {why}: name it in the tokens file, or send a token")
        principal = next(iter(matches.values())).principal
        ends_s = peer.until_s if principal.expires_s is None else min(principal.expires_s, peer.until_s)
        return replace(principal, expires_s=ends_s)

    def _in_time(self, principal: Principal) -> Principal:
        if principal.expires_s is not None and self._now_s() >= principal.expires_s:
            raise Unauthorized(f"the token {principal.name!r} has expired; request a new one")
        return principal

    def _reload_if_changed(self) -> None:
        if self._file.is_due():
            with self._lock:
                if self._file.check():
                    self._reload()

    def _reload(self) -> None:
        try:
            tokens = read_tokens(self._path)
        except InvalidUsage as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _TRANSIENT:
                _log.warning("the known tokens stay valid, and reading the file is retried: %s", error.message)
                self._file.again()
                return
            _log.warning("all tokens are rejected until this is fixed: %s", error.message)
            self._is_broken, tokens = True, {}
        else:
            self._is_broken = False
        self._take(tokens)

    def _take(self, tokens: dict[str, KnownToken]) -> None:
        self._by_certificate = {known.certificate: known for known in tokens.values() if known.certificate is not None}
        self._by_id = tokens


def read_tokens(path: str) -> dict[str, KnownToken]:
    """The tokens of a file, by their ids. Raises InvalidUsage."""
    try:
        return parse_tokens(read_tokens_file(path), path)
    except FileNotFoundError as error:
        raise InvalidUsage(f"the tokens file {path} cannot be read: {error.strerror}") from error


def read_tokens_file(path: str) -> bytes:
    """The bytes of a tokens file. Raises FileNotFoundError, and InvalidUsage if it cannot be read.

    Whoever can write the file can mint tokens, so a file that others than its owner may write is rejected.
    """
    try:
        data, mode = read_with_mode(path, FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidUsage(f"the tokens file {path} cannot be read: {error.strerror}") from error
    if mode & OTHERS_WRITE:
        raise InvalidUsage(
            f"the tokens file {path} has the mode {mode:04o}, so other users can write it and grant themselves access: "
            f"review its content, then run chmod go-w {path}"
        )
    return data


def entries_of(data: bytes, path: str) -> list[dict[str, Any]]:
    """The unchecked entries in the content of a file. Raises InvalidUsage."""
    if len(data) > FILE_BYTES_MAX:
        raise InvalidUsage(f"the tokens file {path} is longer than {FILE_BYTES_MAX} bytes")
    try:
        entries = json.loads(data, object_pairs_hook=named_once)["tokens"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidUsage(f'the tokens file {path} is not of the form {{"tokens": […]}}: {error}') from error
    if not isinstance(entries, list) or len(entries) > TOKENS_MAX or not all(isinstance(e, dict) for e in entries):
        raise InvalidUsage(f"the tokens file {path} must hold a list of at most {TOKENS_MAX} tokens")
    return entries


def parse_tokens(data: bytes, path: str) -> dict[str, KnownToken]:
    """The tokens in the content of a file, by their ids. Raises InvalidUsage."""
    entries = entries_of(data, path)
    tokens = dict(_entry(entry, number, path) for number, entry in enumerate(entries))
    if len(tokens) != len(entries):
        raise InvalidUsage(f"the tokens file {path} contains an id twice")
    certificates = [known.certificate for known in tokens.values() if known.certificate is not None]
    if len(set(certificates)) != len(certificates):
        raise InvalidUsage(f"the tokens file {path} contains a certificate twice")
    return tokens


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
            f"{place} needs id, sha256 or certificate, and scopes; prefixes and expires are optional: {error}"
        ) from error
    if (digest is not None and len(digest) != 32) or not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name):
        raise InvalidUsage(f"{place} needs an id of letters, digits and '-', and the SHA-256 of the token in hex")
    if not scopes or not set(scopes) <= set(SCOPES) or not all(prefixes):
        raise InvalidUsage(f"{place} needs scopes out of {', '.join(SCOPES)}, and non-empty prefixes")
    expires_s = None if until is None else until.timestamp()
    included: frozenset[str] = frozenset().union(*(INCLUDED[scope] for scope in scopes))
    return name, KnownToken(Principal(name, included, prefixes, expires_s), digest, certificate)


def expiry_of(text: str) -> datetime:
    """When a token expires, in UTC unless the text has a zone. Raises ValueError, TypeError if it is not a date."""
    expiry = datetime.fromisoformat(text)
    return expiry if expiry.tzinfo is not None else expiry.replace(tzinfo=UTC)


def _texts(value: object) -> list[str]:
    """A list of strings; a single string is rejected. Raises TypeError."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"scopes and prefixes are lists of strings, not {value!r:.100}")
    return value


def mint(name: str) -> tuple[str, str]:
    """A new token with that id, and its SHA-256 to store."""
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name):
        raise InvalidUsage(f"a token's id is 1 to 64 letters, digits and '-', not {name!r}")
    token = f"pt_{name}_{secrets.token_urlsafe(32)}"
    return token, hashlib.sha256(token.encode()).hexdigest()


_WIDEST_FIRST = (ADMIN, MANAGE, WRITE, MAINTAIN, READ)


def tokens_for_check(tokens: Mapping[str, KnownToken]) -> list[TokenFacts]:
    """The tokens with an expiry for `persist check`, sorted by id."""
    facts = []
    for name, known in sorted(tokens.items()):
        principal = known.principal
        if principal.expires_s is not None:
            scope = next(scope for scope in _WIDEST_FIRST if scope in principal.scopes)
            facts.append(TokenFacts(name, int(principal.expires_s * 1000), scope, principal.prefixes))
    return facts


# Labels of callers in metrics and logs. Token ids have no underscore, so these cannot collide with one.
UNKNOWN = "_unknown"
_OWN = ((ANONYMOUS, "_anybody"), (UNAUTHENTICATED, "_anybody"), (MAINTENANCE, "_maintenance"))


def label_of(principal: Principal | None) -> str:
    """The label under which a caller is counted; None: an unknown caller."""
    if principal is None:
        return UNKNOWN
    return next((label for own, label in _OWN if principal is own), principal.name)
