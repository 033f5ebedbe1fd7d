"""A command that waits for its commit."""

from __future__ import annotations

from collections.abc import Callable

from persist.core import commands as c


class Pending:
    """A queued command. Woken once with its outcome, or before that to lead the next commit."""

    __slots__ = ("command", "error", "result", "wake")

    def __init__(self, command: c.Command, wake: Callable[[Pending], None]) -> None:
        self.command = command
        self.wake = wake
        self.result: c.Result | None = None
        self.error: BaseException | None = None

    @property
    def answered(self) -> bool:
        return self.result is not None or self.error is not None

    def outcome(self) -> c.Result:
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def inline_bytes(pending: Pending) -> int:
    runs = getattr(pending.command, "runs", ())
    return sum(part.size for run in runs for part in run.parts if part.is_inline)
