"""Runs docs/tutorial.md as a reader would: Python in one program, commands in a shell beside a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.pages import Block, blocks, commands, run_python
from tests.support.server import Server

PAGE = "docs/tutorial.md"
SERVE = "persist serve --dir shop"
URL = "http://127.0.0.1:8787"
SPARK = "PySpark"
COMMAND_S = 120.0


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
                url = servers.enter_context(Server(directory / "shop", maintenance=True)).url
            else:
                _run_shell(block, directory)


def _run_shell(block: Block, directory: Path) -> None:
    for command in commands(block.text):
        ran = subprocess.run(
            command, shell=True, cwd=directory, env=_shell(), capture_output=True, text=True, timeout=COMMAND_S
        )
        assert ran.returncode == 0, f"line {block.line}: {command}\n{ran.stdout}\n{ran.stderr}"
        if block.prints is not None:
            assert _plain(ran.stdout) == _plain(block.prints), f"line {block.line}: {command}"


def _shell() -> dict[str, str]:
    """`persist` on the path, as in an activated environment."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def _plain(text: str) -> str:
    """Without what the last newline and the spacing of JSON may be."""
    return re.sub(r"(?<=[:,]) ", "", text.strip().replace("\r\n", "\n"))
