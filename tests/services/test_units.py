"""deploy/systemd: systemd's own tool reads the units and judges how confined they are; what they run can be run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from persist.core.shard_settings import bytes_of
from rpc.cli.program import main, parser_for
from rpc.cli.serve import STOP_EXTRA_S
from rpc.settings import ServerSettings
from tests.support.installed import installed
from tests.support.pages import ROOT

HERE = ROOT / "deploy" / "systemd"
UNITS = sorted([*HERE.glob("*.service"), *HERE.glob("*.timer")])
SERVICES = sorted(HERE.glob("*.service"))
EXPOSED_MAX = 20  # tenths, of systemd's own scale from 0 (confined) to 100
PROGRAM = "/opt/persist/bin/persist"
SERVER_MIB = 512  # below which a server stays under any one attack: docs/operations.md
UNITS_OF = {"M": 1, "G": 1024}


def analyze(*arguments: str) -> str:
    """What systemd-analyze complains of in our units. Skipped where it is not installed, but not in CI."""
    done = subprocess.run([installed("systemd-analyze"), *arguments], capture_output=True, text=True, check=False)
    said = done.stderr + (done.stdout if done.returncode else "")
    return "\n".join(line for line in said.splitlines() if "persist" in line)  # units of the machine are not ours


def placed(directory: Path, name: str = "", change: tuple[str, str] = ("", "")) -> list[str]:
    """Copies of all units, whose program is one that is here; `change` is made in one of them."""
    found = []
    for unit in UNITS:
        text = unit.read_text().replace(PROGRAM, sys.executable)
        if unit.name == name:
            assert change[0] in text
            text = text.replace(change[0], change[1], 1)
        (directory / unit.name).write_text(text)
        found.append(str(directory / unit.name))
    return found


def values(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


def mib(size: str) -> int:
    return int(size[:-1]) * UNITS_OF[size[-1]]


def test_systemd_has_nothing_to_say_against_the_units(tmp_path: Path) -> None:
    assert analyze("verify", *placed(tmp_path)) == ""


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.name)
def test_a_service_is_confined(unit: Path) -> None:
    assert analyze("security", "--offline=true", f"--threshold={EXPOSED_MAX}", "--no-pager", str(unit)) == ""
    assert values(unit, "User") == ["persist"]
    assert values(unit, "MemoryMax")


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.name)
def test_the_command_of_a_service_can_be_typed(unit: Path) -> None:
    (line,) = values(unit, "ExecStart")
    program, command, *words = shlex.split(line)
    assert program == PROGRAM
    parser_for(command).parse_args([command, *(word.replace("%i", "8788") for word in words)])


def test_a_timer_has_its_service_and_a_service_without_one_is_enabled() -> None:
    timed = {unit.with_suffix(".service") for unit in UNITS if unit.suffix == ".timer"}
    assert timed <= set(SERVICES)
    assert [unit.name for unit in SERVICES if bool(values(unit, "WantedBy")) == (unit in timed)] == []


def test_a_service_has_the_time_and_the_memory_that_it_needs() -> None:
    server, alone, maintenance = (HERE / f"{name}.service" for name in ("persist", "persist@", "persist-maintenance"))
    for unit in (server, alone, maintenance):
        assert int(values(unit, "TimeoutStopSec")[0]) > ServerSettings().shutdown_s + STOP_EXTRA_S
        assert mib(values(unit, "MemoryHigh")[0]) < mib(values(unit, "MemoryMax")[0])
    merging = bytes_of(parser_for("maintain").parse_args(["maintain", "run"]).memory) // 1024**2
    assert mib(values(server, "MemoryHigh")[0]) >= SERVER_MIB + merging
    assert mib(values(alone, "MemoryHigh")[0]) >= SERVER_MIB
    assert mib(values(maintenance, "MemoryHigh")[0]) >= merging + merging // 2


def test_the_settings_that_come_with_the_units_can_be_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("PERSIST_")]:
        monkeypatch.delenv(name)
    with monkeypatch.context() as restored:
        restored.setattr(os, "environ", dict(os.environ))  # what the file says is put there
        assert main(["serve", "--config", str(HERE / "persist.toml"), "--check"]) == 0
    assert 'directory = "/var/lib/persist"' in capsys.readouterr().out
    assert values(HERE / "persist.service", "StateDirectory") == ["persist"]


def test_the_user_of_the_units_is_made() -> None:
    assert re.search(r"^u persist ", (HERE / "persist.sysusers").read_text(), re.MULTILINE)
