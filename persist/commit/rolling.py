"""Making rollups: a State is written to a blob, then named by a commit.

Two may do so for one State, and one of them is named. The other one's blob is deleted by who wrote it: else the sweep
would find it a day later, and the receipt of an erasure would wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from persist.commit.versions import Versions
from persist.core import commands as c
from persist.core.errors import PersistError
from persist.core.state import State
from persist.formats.store_errors import translated


def rolled_up(versions: Versions, state: State, apply: Callable[[c.Command], c.Result]) -> bool:
    """Write the State as a rollup and have it named; whether it is. Raises what the stores raise.

    After an error nobody knows whether it is named: then its blob stays.
    """
    command = c.AddRollup(state.seqno, *versions.write_rollup(state))
    result = apply(command)
    dropped(versions, command, result)
    return result == c.RollupAdded(True)


def dropped(versions: Versions, command: c.Command, result: c.Result) -> None:
    """Delete the rollup of a command that the shard has refused.

    It is never named later: another rollup stands in its place, or a newer one is there, and that is never undone.
    """
    if isinstance(command, c.AddRollup) and result == c.RollupAdded(False):
        with suppress(PersistError), translated():  # the sweep finds it
            versions.blob.delete([command.key])
