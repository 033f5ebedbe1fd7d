"""How a server starts maintenance beside itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

NICENESS = 10


def child_command(
    *,
    directory: str | None = None,
    blob: str | None = None,
    consensus: str | None = None,
    url: str | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The command line of a process of low priority that merges and collects the shards of a location.

    It ends when this process does, which has to be the one that starts it. It commits through the server at `url` if
    that is given. The URLs of stores and the server's token go by the environment (PERSIST_BLOB, PERSIST_CONSENSUS,
    PERSIST_TOKEN), because they may be secret and anybody may read a command line; the caller puts them there.
    """
    command = [sys.executable, "-m", "persist.cli", "compactor", "--gc", "--nice", str(NICENESS)]
    command += ["--end-with-parent", str(os.getpid())]
    if directory is not None and blob is None and consensus is None:
        command += ["--dir", directory]
    if url is not None:
        command += ["--url", url]
    return [*command, *extra]
