"""Commands start soon: none but `serve` loads what only a server needs, which took a fifth of their start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa

import persist

LOAD = """
import sys
from rpc.cli.program import COMMANDS, main, parser_for

def check(name):
    loaded = {"fastapi", "pydantic", "starlette", "uvicorn"} & sys.modules.keys()
    assert not loaded, f"{name} loads {sorted(loaded)}"

for name in sorted(COMMANDS.keys() - {"serve"}):
    parser_for(name)
    check(name)
assert main(["cat", "orders", "--dir", sys.argv[1]]) == 0
check("a command that reads rows")
"""


def test_no_command_but_serve_loads_the_framework_of_the_server(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}") as client:
        client.create_shard("orders", pa.schema([("id", pa.int64())]), ["id"]).insert([{"id": 1}])
    ran = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, '{"id":1}\n'), ran.stderr
