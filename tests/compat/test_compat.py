"""Old bytes stay readable: every frozen location opens, reads as it did when it was written, and can be written on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import persist
from tests.compat.generate import HERE, contents

FROZEN = sorted(path.parent for path in HERE.glob("*/expected.json"))


def test_there_are_frozen_locations() -> None:
    assert [path.name for path in FROZEN][:1] == ["v2"]


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda path: path.name)
def test_a_frozen_location_reads_as_it_did(frozen: Path, tmp_path: Path) -> None:
    shutil.copytree(frozen / "location", tmp_path / "location")
    expected = json.loads((frozen / "expected.json").read_text())
    with persist.connect(f"persist://{tmp_path}/location") as client:
        assert contents(client) == expected
        for name in client.shards():
            shard = client.shard(name)
            upper = shard.upper().element
            assert upper is not None
            shard.insert([{"k": "later", "v": 1}])
            assert shard.snapshot(upper).to_arrow().num_rows == len(expected[name][str(upper - 1)]) + 1
