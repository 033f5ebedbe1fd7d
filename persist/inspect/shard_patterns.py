"""Patterns of shard names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate

from persist.core.errors import InvalidUsage, UnknownShard
from persist.inspect.looking import Look

PATTERN_CHARS_MAX = 256
_CHOICE = re.compile(r"\[[^]]*\]")
_LITERAL = re.compile(r"[A-Za-z0-9._/-]*")


def prefix_of(pattern: str) -> str:
    """What every name begins with that the pattern matches. Raises InvalidUsage: it is none.

    `*` stands for any characters, slashes too, `?` for one, and `[ab]` for one of these.
    """
    is_wrong = re.search(r"[^A-Za-z0-9._/*?\[\]!-]", pattern) or "!" in _CHOICE.sub("", pattern)
    if is_wrong or not 0 < len(pattern) <= PATTERN_CHARS_MAX:
        raise InvalidUsage(f"{pattern!r:.60} is no pattern of names; give a name, or one with * and ?, as 'eu/*'")
    found = _LITERAL.match(pattern)
    return "" if found is None else found[0]


def matching(look: Look, pattern: str | None, *, with_dropped: bool = True) -> Iterator[str]:
    """The names that a pattern matches (None: all that who looks may see), ascending. Raises InvalidUsage."""
    if pattern is None:
        found = dict.fromkeys(n for p in look.prefixes for n in look.names(p, with_dropped=with_dropped))
        yield from sorted(found) if look.prefixes else look.names(with_dropped=with_dropped)
        return
    matches = re.compile(translate(pattern)).match
    yield from (name for name in look.names(prefix_of(pattern), with_dropped=with_dropped) if matches(name))


def check_named(look: Look, name: str) -> None:
    """Raises UnknownShard."""
    if not any(found == name for found in look.names(name)):
        raise UnknownShard(f"there is no shard {name!r} here; `persist shards` lists them")
