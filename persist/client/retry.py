"""Sending commands so that their outcome is known: retries with the same token, within a deadline."""

from __future__ import annotations

from persist.client.transport import Transport
from persist.commit.system import jittered
from persist.core import commands as c
from persist.core.errors import (
    AttributeMismatch,
    Conflict,
    Corruption,
    Indeterminate,
    Overloaded,
    PersistError,
    Unavailable,
    UpperMismatch,
)

BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 2.0
DOUBLINGS_MAX = 10
# What these change is a hold, which lapses by itself: a try of unknown outcome harms nobody, and they have no token.
READS = (
    c.RegisterReader,
    c.HeartbeatReader,
    c.DowngradeSince,
    c.MoveHold,
    c.ExpireReader,
    c.ReadAttributes,
    c.ScanAttributes,
)
# What may be told after a try of unknown outcome. The first three prove that no try landed: a token is looked up before
# the upper and the attributes are, and a shard that was dropped is not found to be held. The others claim nothing. Any
# other error would be the same had a try landed: the rights, the registration or the shard went away after it.
TOLD_AFTER_UNKNOWN = frozenset({UpperMismatch, AttributeMismatch, Conflict, Corruption, PersistError})


def send(transport: Transport, name: str, command: c.Command, retry_s: float) -> c.Result:
    """Apply a command, retrying what is safe to retry for up to `retry_s` seconds.

    Raises Indeterminate where the command may have happened: an earlier try had an unknown outcome, and then the
    deadline passed, or an error came that does not tell what became of that try. Every other error, but for Corruption
    and the root of the tree, means that it did not happen. A read is never Indeterminate: it is asked again.
    """
    reads = isinstance(command, READS)
    deadline = transport.clock.monotonic() + retry_s
    unknown = False
    tries = 0
    while True:
        try:
            return transport.apply(name, command)
        except (Unavailable, Overloaded, Indeterminate) as error:
            unknown = unknown or (isinstance(error, Indeterminate) and not reads)
            tries += 1
            wait = _wait_s(error, tries, transport)
            if transport.clock.monotonic() + wait > deadline:
                if reads and isinstance(error, Indeterminate):
                    raise Unavailable(f"shard {name!r} cannot be read now: no answer came; read it again") from error
                if unknown and not isinstance(error, Indeterminate):
                    raise Indeterminate(
                        f"a command on shard {name!r} may have happened; retry with its token ({error})"
                    ) from error
                raise
            transport.clock.sleep(wait)
        except PersistError as error:
            if not unknown or type(error) in TOLD_AFTER_UNKNOWN:
                raise
            raise Indeterminate(
                f"a command on shard {name!r} may have happened; read it, or retry with its token ({error})"
            ) from error


def _wait_s(error: Exception, tries: int, transport: Transport) -> float:
    if isinstance(error, Overloaded):
        asked = error.details.get("retry_after_s")
        if isinstance(asked, (int, float)) and asked > 0:
            return float(asked)
    return jittered(transport.ids, min(BACKOFF_FIRST_S * 2 ** min(tries, DOUBLINGS_MAX), BACKOFF_MAX_S))
