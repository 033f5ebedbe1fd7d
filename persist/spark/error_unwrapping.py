"""Errors of persist that Spark has wrapped in its own, told as what they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from persist.core import errors
from persist.core.errors import InvalidUsage, PersistError, UpperMismatch

REFUSES = "persist refuses: "  # how an expression that Spark evaluates tells an InvalidUsage
_KIND = re.compile(r"persist\.core\.errors\.(\w+): (.+)")
_REFUSED = re.compile(re.escape(REFUSES) + r"(.+?)(?: SQLSTATE:|\n|$)")
_UPPERS = re.compile(r"has upper (\[\d*\]), not the expected (\[\d*\])")


@contextmanager
def plainly() -> Iterator[None]:
    """Run something of Spark. Raises the error of persist that it ended with, with Spark's as its cause."""
    try:
        yield
    except PersistError:
        raise
    except Exception as error:
        found = told(str(error))
        if found is None:
            raise
        raise found from error


def told(text: str) -> PersistError | None:
    """The error of persist that a traceback ends with; None: there is none."""
    kinds = _KIND.findall(text)
    if not kinds:
        refused = _REFUSED.search(text)
        return None if refused is None else InvalidUsage(refused.group(1))
    name, message = kinds[-1]
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PersistError)):
        return None
    uppers = _UPPERS.search(message)
    if issubclass(kind, UpperMismatch) and uppers is not None:
        actual, expected = (json.loads(one) for one in uppers.groups())
        return kind(message, expected=expected, actual=actual)
    return kind(message)
