"""The commands of pages, run in a shell as a reader would type them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.pages import Block, commands

COMMAND_S = 120.0


def environment(**more: str) -> dict[str, str]:
    """`persist` on the path, as in an activated environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PERSIST_")}
    return {**kept, "PATH": path, **more}


def run_shell(block: Block, directory: Path) -> None:
    """Run the commands of a block there. What they print together is what stands below it, if anything does."""
    said = ""
    for command in commands(block.text):
        ran = subprocess.run(
            command, shell=True, cwd=directory, env=environment(), capture_output=True, text=True, timeout=COMMAND_S
        )
        assert ran.returncode == 0, f"line {block.line}: {command}\n{ran.stdout}\n{ran.stderr}"
        said += ran.stdout
    if block.prints is not None:
        assert _plain(said) == _plain(block.prints), f"line {block.line}: {block.text}"


def _plain(text: str) -> str:
    """Without what the last newline and the spacing of JSON may be."""
    return re.sub(r"(?<=[:,]) ", "", text.strip().replace("\r\n", "\n"))
