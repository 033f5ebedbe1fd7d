"""The arguments by which commands find their shards: a directory, or the URLs of two stores."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from persist.commit.location import Location, LocationSettings, open_location, open_stores
from persist.commit.location import check_there as check_there
from persist.core.errors import InvalidUsage

DEFAULT_DIRECTORY = "persist-data"


@dataclass(frozen=True)
class Where:
    """Either a directory or both URLs; nothing means the default directory."""

    directory: str | None = None
    blob: str | None = None
    consensus: str | None = None

    def open(self, settings: LocationSettings | None = None, *, must_exist: bool = False) -> Location:
        """Open the location. Raises InvalidUsage saying what is wrong with the arguments."""
        if self.blob or self.consensus:
            if self.directory or not (self.blob and self.consensus):
                raise InvalidUsage("give either --dir, or both --blob and --consensus")
            if must_exist:
                check_there(self.blob or "")
            return open_stores(self.blob or "", self.consensus or "", settings=settings)
        path = Path(self.directory or DEFAULT_DIRECTORY).absolute()
        if must_exist and not path.exists():
            raise InvalidUsage(f"{path} does not exist; give --dir, or --blob and --consensus")
        return open_location(f"persist://{quote(str(path))}", settings=settings)


def check_given(arguments: argparse.Namespace, *names: str) -> None:
    """Raises InvalidUsage where one of these arguments is given and empty, as by a variable of a shell that is not set.

    Then who gave it would not get what was asked for, and not be told.
    """
    for name in names:
        if getattr(arguments, name) == "":
            raise InvalidUsage(f"--{name.replace('_', '-')} is empty: give a value, or leave it out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --dir, --blob and --consensus; PERSIST_DIRECTORY, PERSIST_BLOB, PERSIST_CONSENSUS are their defaults."""
    parser.add_argument(
        "--dir", metavar="PATH", help=f"directory that holds the shards (default ./{DEFAULT_DIRECTORY})"
    )
    parser.add_argument("--blob", metavar="URL", help="blob store: file:///dir, s3://bucket/prefix, …")
    parser.add_argument(
        "--consensus", metavar="URL", help="consensus store; a password is better kept in PERSIST_CONSENSUS"
    )


def where_of(arguments: argparse.Namespace) -> Where:
    """What the arguments say, or else the environment."""
    if arguments.dir or arguments.blob or arguments.consensus:
        blob = arguments.blob or (os.environ.get("PERSIST_BLOB") if arguments.consensus else None)
        consensus = arguments.consensus or (os.environ.get("PERSIST_CONSENSUS") if arguments.blob else None)
        return Where(arguments.dir, blob, consensus)
    environment = os.environ
    return Where(
        environment.get("PERSIST_DIRECTORY"), environment.get("PERSIST_BLOB"), environment.get("PERSIST_CONSENSUS")
    )
