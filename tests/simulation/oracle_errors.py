"""What a check raises."""

from __future__ import annotations


class Violation(Exception):
    """A promise was broken. `check` names it."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


def expect(condition: bool, check: str, message: str) -> None:
    if not condition:
        raise Violation(check, message)


__all__ = ["Violation", "expect"]
