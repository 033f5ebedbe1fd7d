"""`persist upgrade`: has the location written at the newest level that this persist knows."""

from __future__ import annotations

import argparse

from persist.cli.where import add_arguments as add_arguments
from persist.cli.where import where_of
from persist.commit.levels import raise_level
from persist.formats.state_frames import THIS_BUILD


def run(arguments: argparse.Namespace) -> int:
    location = where_of(arguments).open(must_exist=True)
    try:
        before, after = raise_level(location.blob, THIS_BUILD)
    finally:
        location.close()
    print(f"level {before}: nothing to do" if before == after else f"level {before} raised to {after}")
    return 0
