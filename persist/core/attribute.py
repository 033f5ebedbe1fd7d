"""Attributes: 16-byte keys with int64 values, kept with a shard and changed atomically with an append.

The State holds an overlay of recent values; older ones are in an index of immutable blobs. This module has keys,
updates and their conditions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NewType, Self

from persist.core.errors import AttributeMismatch, InvalidUsage, shown
from persist.core.record import Meta, Record

KEY_BYTES = 16
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_HEX = frozenset("0123456789abcdef")


AttributeKey = NewType("AttributeKey", str)  # 16 bytes as 32 hex digits; ordered as its bytes are
GivenKey = Annotated[AttributeKey, Meta(pattern=rf"\A[0-9a-f]{{{2 * KEY_BYTES}}}\Z")]  # checked when it is decoded


def attribute_key(key: object) -> AttributeKey:
    """The key for a UUID, 16 bytes or hex digits (with or without dashes). Raises InvalidUsage."""
    if isinstance(key, (bytes, bytearray, memoryview)):
        text: object = bytes(key).hex()
    else:
        written = key if isinstance(key, str) else getattr(key, "hex", None)
        text = written.replace("-", "").lower() if isinstance(written, str) else key
    if not isinstance(text, str) or len(text) != 2 * KEY_BYTES or not _HEX.issuperset(text):
        raise InvalidUsage(f"an attribute's key is written as {2 * KEY_BYTES} hex digits, not {shown(text)}")
    return AttributeKey(text)


def named_key(name: str) -> AttributeKey:
    """The key for a name of any length, such as that of a streaming query. Raises InvalidUsage."""
    if not isinstance(name, str):
        raise InvalidUsage(f"the name of a key is text, not {shown(name)}")
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise InvalidUsage(f"the name of a key is Unicode text; {name!a:.80} has half a surrogate pair")
    return AttributeKey(hashlib.sha256(b"persist attribute\0" + name.encode()).hexdigest()[: 2 * KEY_BYTES])


def key_after(key: AttributeKey) -> AttributeKey | None:
    """The least key beyond this one, or None."""
    number = int(key, 16) + 1
    return AttributeKey(f"{number:032x}") if number < 1 << 8 * KEY_BYTES else None


def is_core_key(key: AttributeKey) -> bool:
    """Whether the shard maintains this attribute: users may read it, not write it."""
    return key.startswith((CORE_PREFIX, MARK_PREFIX))


CORE_PREFIX = "0" * 28
MARK_PREFIX = "ff" * 10  # of marks in the index (`persist.core.clock_index`), which come after all attributes
MARKS_FROM = AttributeKey(MARK_PREFIX + "0" * 12)
EVENT_COUNT = AttributeKey(CORE_PREFIX + "0001")  # updates ever appended, as they were given
BYTE_COUNT = AttributeKey(CORE_PREFIX + "0002")  # bytes of the parts ever appended

REPLACE = "replace"
REPLACE_IF_GREATER = "replace_if_greater"
REPLACE_IF_EQUALS = "replace_if_equals"
ACCUMULATE = "accumulate"
DELETE = "delete"
VERBS = (REPLACE, REPLACE_IF_GREATER, REPLACE_IF_EQUALS, ACCUMULATE, DELETE)
_NEEDS_VALUE = frozenset({REPLACE_IF_GREATER, REPLACE_IF_EQUALS, ACCUMULATE})


class AttributeUpdate(Record, frozen=True):
    """One change of one attribute, perhaps under a condition. Made by the class methods below.

    `expected` belongs to `replace_if_equals` (None: the attribute must be unset); the others ignore it.
    """

    key: GivenKey
    verb: str
    value: int = 0
    expected: int | None = None

    @classmethod
    def replace(cls, key: object, value: int) -> Self:
        """Set the attribute."""
        return cls(attribute_key(key), REPLACE, value)

    @classmethod
    def replace_if_greater(cls, key: object, value: int) -> Self:
        """Set the attribute iff it is unset or less than `value`."""
        return cls(attribute_key(key), REPLACE_IF_GREATER, value)

    @classmethod
    def replace_if_equals(cls, key: object, value: int, expected: int | None) -> Self:
        """Set the attribute iff it is `expected`; None: iff it is unset."""
        return cls(attribute_key(key), REPLACE_IF_EQUALS, value, expected)

    @classmethod
    def accumulate(cls, key: object, value: int) -> Self:
        """Add `value` to the attribute; unset counts as 0."""
        return cls(attribute_key(key), ACCUMULATE, value)

    @classmethod
    def delete(cls, key: object) -> Self:
        """Unset the attribute."""
        return cls(attribute_key(key), DELETE)

    @property
    def needs_value(self) -> bool:
        """Whether the outcome depends on the attribute's current value."""
        return self.verb in _NEEDS_VALUE


class IndexRoot(Record, frozen=True):
    """The root of the attribute index: a B+tree whose nodes have ascending offsets in a sequence of chunks.

    `flushes` counts its versions: two roots with the same count are the same. The root node has `length` bytes at
    `offset`, and the tree `height` levels (0: it is empty). No live node is before `lowest`; the next one will begin
    at `end`.
    """

    flushes: int = 0
    offset: int = 0
    length: int = 0
    height: int = 0
    lowest: int = 0
    end: int = 0
    count: int = 0  # attributes in the tree


NO_INDEX = IndexRoot()


class IndexChunk(Record, frozen=True):
    """A blob with nodes of the index; the State maps its first offset to it."""

    key: str
    length: int


def check_updates(updates: Iterable[AttributeUpdate]) -> None:
    """Raise InvalidUsage unless every update can be applied to some State."""
    for update in updates:
        if update.verb not in VERBS:
            raise InvalidUsage(f"attributes know no verb {shown(update.verb)}; it is one of {', '.join(VERBS)}")
        if is_core_key(update.key):
            raise InvalidUsage(f"attribute {update.key} is maintained by the shard; use another key")
        _check_int64(update.key, update.value)
        if update.expected is not None:
            _check_int64(update.key, update.expected)


def updated(
    updates: Iterable[AttributeUpdate], current: Callable[[AttributeKey], int | None]
) -> dict[AttributeKey, int | None]:
    """The values (None: deleted) after all updates, applied in order; `current` returns the values before.

    Raises AttributeMismatch, with the actual values, if a condition fails; InvalidUsage if a sum exceeds int64.
    """
    changed: dict[AttributeKey, int | None] = {}
    failed: dict[str, int | None] = {}
    for update in updates:
        key, verb = update.key, update.verb
        if verb in (REPLACE, DELETE):
            changed[key] = update.value if verb == REPLACE else None
            continue
        actual = changed[key] if key in changed else current(key)
        if verb == ACCUMULATE:
            changed[key] = _check_int64(key, (actual or 0) + update.value)
        elif actual == update.expected if verb == REPLACE_IF_EQUALS else actual is None or actual < update.value:
            changed[key] = update.value
        else:
            failed[key] = actual
    if failed:
        raise _mismatch(failed)
    return changed


def _mismatch(actual: Mapping[str, int | None]) -> AttributeMismatch:
    key, value = next(iter(actual.items()))
    actual_text = "unset" if value is None else str(value)
    return AttributeMismatch(
        f"attribute {key} is {actual_text}, which its update's condition does not allow ({len(actual)} failed); "
        "read it and decide anew",
        actual=dict(actual),
    )


def _check_int64(key: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not INT64_MIN <= value <= INT64_MAX:
        raise InvalidUsage(f"attribute {key} would be {shown(value)}, which is no 64-bit integer")
    return value


def as_updates(updates: Any) -> tuple[AttributeUpdate, ...]:
    """One update or several, as a tuple. Raises InvalidUsage on anything else."""
    listed = tuple(updates) if isinstance(updates, Iterable) else (updates,)
    for update in listed:
        if not isinstance(update, AttributeUpdate):
            raise InvalidUsage(f"attributes are changed by AttributeUpdate, not {type(update).__name__}")
        _check_int64(update.key, update.value)
        if update.expected is not None:
            _check_int64(update.key, update.expected)
    return listed
