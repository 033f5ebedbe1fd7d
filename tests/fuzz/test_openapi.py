"""What the OpenAPI of a running server allows, and much that it does not: answers are of the API, never of a bug."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from tests.support.examples import size
from tests.support.server import Server
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([pa.field("k", pa.string())])
EXAMPLES = size(1, 8)  # for each operation
# A time that is not complete yet, and a wait that ends before it is, is a 503 as the page says, and no bug.
EXPECTED = 'not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503"]'


def document_of(server: Server) -> dict[str, object]:
    with urllib.request.urlopen(f"{server.url}/openapi.json", timeout=WAIT_S) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def fuzzable(document: dict[str, object]) -> dict[str, object]:
    """Without what the fuzzer cannot drive: streams that do not end, and bodies that it has no writer for."""
    paths = {path: item for path, item in document["paths"].items() if not path.endswith("/listen")}  # type: ignore[attr-defined]
    text = json.dumps({**document, "paths": paths})
    for binary in ("application/x-ndjson", "application/vnd.persist.record"):
        text = text.replace(f'"{binary}"', '"text/plain"')
    changed: dict[str, object] = json.loads(text)
    return changed


@pytest.mark.smoke
@pytest.mark.proof
def test_no_request_makes_the_server_fail(tmp_path: Path) -> None:
    """No answer is a 5xx that stands for a bug, and what was stored before is there afterwards."""
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program is not None, "schemathesis is one of the development tools: make venv"
    with Server(tmp_path / "data") as server:
        with persist.connect(server.url) as client:
            client.create_shard("kept", SCHEMA, ["k"]).insert([{"k": "a"}])
        schema = tmp_path / "openapi.json"
        schema.write_text(json.dumps(fuzzable(document_of(server))))
        (tmp_path / "schemathesis.toml").write_text(f"[checks]\n{EXPECTED}\n")
        command = [program, "run", str(schema), "--url", server.url, "--checks", "not_a_server_error", "--seed", "1"]
        command += ["--max-examples", str(EXAMPLES), "--request-timeout", "120", "--phases", "examples,fuzzing"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=4 * WAIT_S, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        with persist.connect(server.url) as client:
            assert client.shard("kept").snapshot(0).to_arrow().to_pydict() == {"k": ["a"], "__diff": [1]}
