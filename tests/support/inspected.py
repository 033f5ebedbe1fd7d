"""A frozen location to inspect, all that lies there byte by byte, and the commands that look at it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from contextlib import suppress
from pathlib import Path

from rpc.cli import program
from tests.compat.sample import HERE, LOCATION

NOW_MS = 1_796_051_700_000  # 2026-11-30T15:15:00Z, 15 hours after it was made
SHARD = HERE / "v1" / LOCATION / "blob/s888959849585e19650ada335a3e06ebd"
PART, ROLLUP = (  # of the shard that has one of all that there is
    sorted(path.relative_to(SHARD.parent).as_posix() for path in SHARD.glob(pattern))[-1]
    for pattern in ("wc0*/*.parquet", "v*/*.rollup")
)
UNNAMED = PART[:-9] + ("0" if PART[-9] != "0" else "1") + PART[-8:]  # the key of a part that no State names

# Each command with what it is asked, by the name of its golden file.
COMMANDS: dict[str, list[str]] = {
    "state": ["state", "orders"],
    "state-at": ["state", "orders", "--at", "v9"],
    "state-timestamp": ["state", "orders", "--timestamp", "2026-11-30T00:11:07.000Z"],
    "state-keys": ["state", "eu/copies", "--keys"],
    "log": ["log", "orders"],
    "log-span": ["log", "orders", "--from", "4", "--to", "v6"],
    "state-changes": ["state", "orders", "--from", "v2", "--at", "v31"],
    "state-merge": ["state", "tagged", "--from", "7", "--at", "17"],
    "parts": ["parts", "many"],
    "parts-keys": ["parts", "orders", "--keys"],
    "part": ["part", PART],
    "part-keys": ["part", PART, "--keys"],
    "part-rows": ["part", PART, "--rows", "3"],
    "holds": ["holds", "orders"],
    "holds-claims": ["holds", "eu/copies"],
    "holds-tags": ["holds", "tagged"],
    "attributes": ["attributes", "orders"],
    "attributes-span": ["attributes", "orders", "--lower", "4" + "0" * 31, "--upper", "8" + "f" * 31],
    "usage": ["usage"],
    "usage-some": ["usage", "t*"],
    "digest": ["digest", "orders"],
    "digest-as-of": ["digest", "tagged", "--as-of", "6"],
}


class FixedClock:
    """The wall clock of every look."""

    def now_ms(self) -> int:
        return NOW_MS


def copied(to: Path) -> Path:
    """A copy of the frozen location."""
    shutil.copytree(HERE / "v1" / LOCATION, to)
    return to


def everything(directory: Path, *, but: tuple[str, ...] = ()) -> dict[str, tuple[int, int, bytes]]:
    """All that lies in a directory, directories too: when each was written, its mode, its bytes."""
    found = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        if not (but and path.name.endswith(but)):
            stat = path.stat()
            data = path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(directory))] = stat.st_mtime_ns, stat.st_mode, data
    return found


def flip(path: Path, at: int) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


def spoil_entry(directory: Path, name: str, seqno: int) -> None:
    """Change one byte in the middle of a log entry."""
    connection = sqlite3.connect(directory / "consensus.db")
    with connection:
        where = "WHERE key = ? AND seqno = ?"
        [data] = connection.execute(f"SELECT data FROM consensus_log {where}", (name, seqno)).fetchone()
        spoilt = bytearray(data)
        spoilt[len(spoilt) // 2] ^= 0xFF
        connection.execute(f"UPDATE consensus_log SET data = ? {where}", (bytes(spoilt), name, seqno))
    connection.close()
    for side in ("-wal", "-shm"):
        Path(f"{directory / 'consensus.db'}{side}").unlink(missing_ok=True)


def undated(directory: Path) -> Path:
    """The same, where the store says of every blob that it was written when `FixedClock` stands."""
    for path in directory.rglob("*"):
        if path.is_file():
            os.utime(path, (NOW_MS / 1000, NOW_MS / 1000))
    return directory


def main(words: list[str]) -> int:
    """Ask everything of the location as a user who has no right to write, in a process of its own; says the codes."""
    [place] = words
    commands = [["inspect", *command, "--dir", place] for command in COMMANDS.values()]
    for command in commands:  # as root, so that all modules are loaded
        program.main(command)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    codes = [program.main(command) for command in commands]
    with suppress(OSError), open(f"{place}/blob/x", "w", encoding="utf-8"):
        codes.append(99)
    sys.stderr.write(f"codes {codes}")
    return 0
