"""Checks of callers' arguments, safe opening of named files, and what a notebook shows."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from persist.core.attribute import KEY_BYTES, AttributeUpdate, attribute_key, named_key
from persist.core.errors import InvalidUsage, shown
from persist.core.frontier import TIME_MAX, Antichain
from persist.formats.http_messages import named_once

# Checks of what callers give: each raises InvalidUsage with the argument's name and what it should be.


NUMBER_MAX = 2**62
SPLITS_MAX = 100_000
NUMBER_DIGITS_MAX = 19  # of an int64


def checked(what: str, value: object, *kinds: type) -> None:
    """Raise InvalidUsage unless `value` is one of these kinds; None among them stands for None."""
    if isinstance(value, Antichain) and Antichain not in kinds:
        raise InvalidUsage(
            f"{what} is the frontier {value}; it must be a time: upper().element - 1 is the latest complete one, "
            "since().element the earliest that can be read"
        )
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise InvalidUsage(f"{what} is {shown(value)}; it must be {wanted}")
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidUsage(f"{what} is {value!a:.100}; it is no Unicode text, since it has half a surrogate pair")


def checked_time(what: str, value: object, least: int = 0) -> None:
    """Raise InvalidUsage unless `value` is a time that can be read, or None, which says the latest.

    Wall clocks, which a caller may give as well, were resolved before.
    """
    if not isinstance(value, (int, Antichain, type(None))):
        raise InvalidUsage(f"{what} is {shown(value)}; it must be a time (int), a wall clock (datetime) or None")
    checked(what, value, int, type(None))
    if isinstance(value, int) and not least <= value <= TIME_MAX:
        raise InvalidUsage(f"{what} is {shown(value)}; it must be a time in [{least}, {TIME_MAX}] or None")


def checked_wait(what: str, value: object) -> None:
    """Raise InvalidUsage unless `value` is a number of seconds; one that is not positive does not wait."""
    checked(what, value, int, float)
    if not isinstance(value, (int, float)) or not abs(value) <= NUMBER_MAX:
        raise InvalidUsage(f"{what} is {shown(value)}; it must be a number of seconds, at most {NUMBER_MAX}")


def read_attribute(what: str, text: str) -> AttributeUpdate:
    """The update that `KEY=VALUE` means; `KEY=` unsets. Raises InvalidUsage."""
    key, equals, value = text.rpartition("=")
    number = value.removeprefix("-")
    is_number = number.isascii() and number.isdecimal() and len(number) <= NUMBER_DIGITS_MAX
    if not equals or not key or not (is_number or not value):
        raise InvalidUsage(f"{what} is {text!r:.100}; it must be KEY=VALUE with a whole number, or KEY= to unset it")
    return _attribute(key, int(value) if value else None)


def read_attributes(what: str, text: str) -> tuple[AttributeUpdate, ...]:
    """The updates that a JSON object of keys and numbers means; null unsets. Raises InvalidUsage."""
    try:
        found = json.loads(text, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{what} is no JSON: {error}") from error
    if not isinstance(found, dict) or not all(value is None or type(value) is int for value in found.values()):
        raise InvalidUsage(f'{what} is {text!r:.100}; it must be a JSON object, as {{"position": 7, "other": null}}')
    return tuple(_attribute(key, value) for key, value in found.items())


def _attribute(key: str, value: int | None) -> AttributeUpdate:
    """A key is a UUID, 32 hex digits, or any other name."""
    digits = key.replace("-", "").lower()
    is_hex = len(digits) == 2 * KEY_BYTES and not set(digits) - set("0123456789abcdef")
    found = attribute_key(digits) if is_hex else named_key(key)
    return AttributeUpdate.delete(found) if value is None else AttributeUpdate.replace(found, value)


def checked_sets(what: str, sets: object) -> dict[str, Any]:
    """Raise InvalidUsage unless it names at least one column."""
    if not isinstance(sets, Mapping) or not sets or not all(isinstance(name, str) for name in sets):
        raise InvalidUsage(f"{what} is {sets!r:.100}; it must give values by the names of columns")
    return dict(sets)


def check_numbers(settings: Any) -> None:
    """Check the numbers of a dataclass of settings: whole ones are positive, seconds are not negative."""
    for field in fields(settings):
        value, is_whole = getattr(settings, field.name), field.type == "int"
        if is_whole or field.type == "float":
            checked(field.name, value, int, *(() if is_whole else (float,)))
            if not is_whole <= value <= NUMBER_MAX:
                raise InvalidUsage(f"{field.name} is {shown(value)}; it must be in [{int(is_whole)}, {NUMBER_MAX}]")


def names(what: str, value: object) -> tuple[str, ...]:
    """A list of names as a tuple."""
    if isinstance(value, str):
        raise InvalidUsage(f"{what} is the string {value!r:.100}; it must be a list of names, such as [{value!r:.100}]")
    try:
        found = tuple(value)  # type: ignore[var-annotated, arg-type]
    except TypeError:
        raise InvalidUsage(f"{what} is {shown(value)}; it must be a list of names") from None
    for name in found:
        checked(f"one of {what}", name, str)
    return found


def columns_of(given: str | None) -> list[str] | None:
    """The names that a text lists with commas; None: all."""
    return None if given is None else [column for column in given.split(",") if column]


def check_splits(num_splits: object) -> None:
    """Raise InvalidUsage unless so many splits can be made."""
    if type(num_splits) is not int or not 0 < num_splits <= SPLITS_MAX:
        raise InvalidUsage(f"num_splits is {shown(num_splits)}; it must be an integer in [1, {SPLITS_MAX}]")


# Opening a file that somebody named: a pipe, a device or a directory in its place is refused, and holds nobody up.


OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def opens_regular(path: str, flags: int) -> int:
    """An opener for `open`. Raises OSError where there is no regular file. No pipe is waited for."""
    found = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(found).st_mode):
        return found
    os.close(found)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def read_with_mode(path: str | Path, bytes_max: int) -> tuple[bytes, int]:
    """At most so many bytes of a regular file, and its permissions. Raises OSError."""
    with open(path, "rb", opener=opens_regular) as file:
        return file.read(bytes_max), stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def read_bounded(what: str, path: str | Path, bytes_max: int, *, own: bool = False) -> bytes:
    """The bytes of a file; `what` says which, as in `the quotas file q.json`.

    Raises InvalidUsage: it cannot be read, has more bytes than that, or, where it is to be `own`, others may write it.
    """
    try:
        data, mode = read_with_mode(path, bytes_max + 1)
    except OSError as error:
        raise InvalidUsage(f"{what} cannot be read: {error.strerror}") from error
    if len(data) > bytes_max:
        raise InvalidUsage(f"there are more than {bytes_max} bytes in {what}")
    if own and mode & OTHERS_WRITE:
        raise InvalidUsage(f"{what} has the mode {mode:04o}, so others may write it: run chmod go-w {path}")
    return data


# What a notebook shows of a shard or a snapshot.


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """A title, and a table of names and what they stand for. Everything is escaped."""
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in rows)
    return f"<div><strong>{escape(title)}</strong><table>{cells}</table></div>"
