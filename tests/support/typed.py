"""Commands as somebody types them, at a place that is a directory or a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import persist
from rpc.cli.program import main
from tests.support.server import url_of

KINDS = ("directory", "server")


@dataclass(frozen=True)
class Answered:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@dataclass(frozen=True)
class Place:
    """Where shards are, as commands and as clients name it."""

    where: tuple[str, str]
    url: str

    def client(self) -> persist.Client:
        return persist.connect(self.url)

    def type(self, capsys: pytest.CaptureFixture[str], *words: str) -> Answered:
        """Run a command there; usage errors have the exit code that argparse gives."""
        capsys.readouterr()
        try:
            code = main([*words, *self.where])
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return Answered(code, said.out, said.err)

    def clear(self) -> None:
        """Drop all shards."""
        with self.client() as client:
            if names := client.shards():
                assert client.drop_shards(names, confirm=len(names), force=True).complete


@contextmanager
def place_of(kind: str, directory: Path) -> Iterator[Place]:
    """An empty place; it exists, so that commands which make none find it."""
    with url_of(kind, directory) as url:
        persist.connect(url).close()
        where = ("--dir", str(directory / "data")) if kind == "directory" else ("--url", url)
        yield Place(where, url)
