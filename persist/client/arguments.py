"""Checks of what callers give: each raises InvalidUsage with the argument's name and what it should be."""

from __future__ import annotations

from persist.core.errors import InvalidUsage


def checked(what: str, value: object, *kinds: type) -> None:
    """Raise InvalidUsage unless `value` is one of these kinds; None among them stands for None."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise InvalidUsage(f"{what} is {value!r:.100}; it must be {wanted}")


def names(what: str, value: object) -> tuple[str, ...]:
    """A list of names as a tuple."""
    if isinstance(value, str):
        raise InvalidUsage(f"{what} is the string {value!r:.100}; it must be a list of names, such as [{value!r:.100}]")
    try:
        found = tuple(value)  # type: ignore[var-annotated, arg-type]
    except TypeError:
        raise InvalidUsage(f"{what} is {value!r:.100}; it must be a list of names") from None
    for name in found:
        checked(f"one of {what}", name, str)
    return found
