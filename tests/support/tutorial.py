"""Runs docs/tutorial.md as a reader would: Python in one program, commands in a shell beside a real server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.pages import Block, blocks, run_python
from tests.support.server import Server
from tests.support.shells import run_shell

PAGE = "docs/tutorial.md"
SERVE = "persist serve --dir shop"
URL = "http://127.0.0.1:8787"
SPARK = "PySpark"


def run(directory: Path, *, spark: bool) -> None:
    """Run every block, in `directory`, which is the working directory. `spark`: also those that need PySpark.

    Without PySpark its rows are not written; the blocks after it print nothing that depends on them.
    """
    names: dict[str, Any] = {}
    url = URL
    with ExitStack() as servers:
        for block in blocks(PAGE):
            if block.heading == SPARK and not spark:
                continue
            text = block.text.replace(URL, url)
            block = Block(block.heading, block.language, text, block.line, block.prints)
            if block.language == "python":
                run_python(PAGE, [block], names)
            elif text.strip() == SERVE:
                url = servers.enter_context(Server(directory / "shop", maintenance="beside")).url
            else:
                run_shell(block, directory)
