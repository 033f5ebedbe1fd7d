"""What a caller says counts, or is refused."""

from __future__ import annotations

import argparse
import json
import os

import pytest

from persist.client.stream_cuts import Cut
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from rpc.cli import serve
from rpc.config_file import load
from rpc.settings import ServerSettings


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(given)


def settings_of(*given: str) -> ServerSettings:
    return load(serve.given_by(arguments(*given)), os.environ).settings


def test_serve_keeps_as_much_history_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of("--history", "30d").history == "30d"
    monkeypatch.setenv("PERSIST_HISTORY", "3d")
    assert settings_of().history == "3d"
    assert settings_of("--history", "none").history == "none"
    with pytest.raises(InvalidUsage):
        settings_of("--history", "rubbish").check()


@pytest.mark.parametrize("left_out", ["crc", "v", "location", "epoch", "taken_ms", "kind", "shards"])
def test_a_cut_without_a_field_is_refused(left_out: str) -> None:
    told = json.loads(Cut("l" * 32, 1, 5, "upper", {"orders": Antichain(3)}).to_json())
    del told[left_out]
    with pytest.raises(InvalidUsage):
        Cut.of(told)
