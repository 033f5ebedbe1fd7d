"""deploy/Dockerfile: what it says, and what its steps make.

No container engine is there where the tests run. So the steps are run one by one in an empty directory. What that does
not show: that the base images exist and hold what they should, and what an engine does to run a container.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from rpc.config_file import load
from tests.support.dockerfile import Build, Stage, interpreter, is_ignored, stages
from tests.support.pages import ROOT
from tests.support.waiting import WAIT_S

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
IGNORE = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text()
PACKAGES = ("persist", "blob", "consensus", "rpc", "compactor", "pyspark_persist")
USER = 10001
SIZE_MAX = 450_000_000  # bytes of what lies above the base image


def complaints(text: str) -> list[str]:
    """What is wrong with the recipe of an image that servers run; empty if nothing is."""
    found, made = [], stages(text)
    for stage in made:
        if not re.search(r":v?\d+\.\d+\.\d+", stage.base):
            found.append(f"base {stage.base} has no pinned version")
        for command in stage.all("RUN"):
            found += _unsure(command)
    last = made[-1]
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", last.last("USER") or "root"):
        found.append("it does not run as the number of a user who is not root")
    if last.all("RUN"):
        found.append("the last stage runs commands, and so keeps what they leave")
    found += [f"COPY {rest} is not of an earlier stage" for rest in last.all("COPY") if not rest.startswith("--from=")]
    found += [f"it has no {word}" for word in ("ENTRYPOINT", "CMD", "HEALTHCHECK", "STOPSIGNAL") if not last.all(word)]
    return found


def _unsure(command: str) -> list[str]:
    """Steps by which a file comes in that no hash was told of."""
    found = []
    for step in command.split("&&"):
        if re.search(r"\bpip (install|wheel|--python)", step) and not any(
            sure in step for sure in ("--require-hashes", "--no-deps")
        ):
            found.append(f"{step.strip()} takes what no lock names")
        if "--no-deps" in step and not any(sure in step for sure in ("--no-index", "--no-build-isolation")):
            found.append(f"{step.strip()} may take libraries that build from anywhere")
        if re.search(r"\b(curl|wget|git|apt-get)\b", step):
            found.append(f"{step.strip()} takes what no lock names")
    return found


def test_the_recipe_is_sound() -> None:
    assert complaints(DOCKERFILE.read_text()) == []


def test_the_image_takes_every_package_and_nothing_else_of_a_checkout() -> None:
    made = {word for stage in stages(DOCKERFILE.read_text()) for rest in stage.all("COPY") for word in rest.split()}
    assert made >= {*PACKAGES, "pyproject.toml", "requirements/server.lock", "requirements/build.lock"}
    assert not any(is_ignored(f"{package}/__init__.py", IGNORE) for package in PACKAGES)
    for out in (".git/config", ".venv/bin/python", "persist-data/consensus.db", "tests/conftest.py", "rpc/__pycache__"):
        assert is_ignored(out, IGNORE), out


# --- its steps, one by one


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """All files, with their sizes and when they were changed."""
    found = {path: path.lstat() for path in sorted(root.rglob("*"))}
    return {str(path.relative_to(root)): (is_.st_size, is_.st_mtime_ns) for path, is_ in found.items()}


def environment(image: Build, stage: Stage, **more: str) -> dict[str, str]:
    """What a process of a container has, and nothing of ours."""
    return {**{name: image.moved(value) for name, value in stage.environment.items()}, "PERSIST_PORT": "0", **more}


def user() -> dict[str, int]:
    """Root becomes the user of the image where that one can reach our interpreter."""
    python = Path(os.path.realpath(interpreter()))
    reached = all(path.stat().st_mode & stat.S_IXOTH for path in [python, *python.parents])
    return {"user": USER, "group": USER} if os.getuid() == 0 and reached else {}


@contextmanager
def container(image: Build, stage: Stage, **more: str) -> Iterator[str]:
    """The URL of a server that runs as the image says. SIGTERM ends it, by exit code 0."""
    at = image.root / "var/lib/persist"
    process = subprocess.Popen(
        _found(image, stage.command), cwd=at, env=environment(image, stage, **more), stdout=subprocess.PIPE, **user()
    )
    assert process.stdout is not None
    with process.stdout as said:
        try:
            yield said.readline().decode().strip()
        finally:
            process.send_signal(getattr(signal, stage.last("STOPSIGNAL") or ""))
            code = process.wait(WAIT_S)
    assert code == 0


def _found(image: Build, words: list[str]) -> list[str]:
    """The command with the program as the search path of the image finds it, in the image alone."""
    program = image.root / "opt/persist/bin" / words[0]
    assert program.exists(), f"{words[0]} is not in the image"
    return [str(program), *words[1:]]


def ended(image: Build, stage: Stage, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command as the image says, to its end."""
    return subprocess.run(
        _found(image, words),
        cwd=image.root / "var/lib/persist",
        env=environment(image, stage),
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        **user(),
    )


def checked(image: Build, stage: Stage, url: str) -> int:
    """The exit code of the health check, of a server at this URL."""
    words = [word.replace("http://127.0.0.1:8787", url) for word in stage.health_check]
    assert words != stage.health_check
    return ended(image, stage, words).returncode


def test_the_command_of_the_page_keeps_bodies_within_the_memory_that_it_gives_to_tmp() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    size = re.search(r"docker run .*--tmpfs /tmp:size=(\d+)m ", page)
    assert size is not None
    limits = load({}, dict(re.findall(r" -e (PERSIST_LIMIT_\w+)=(\d+)", page))).settings.limits
    assert limits.blob_bytes_max < limits.spool_bytes_max < int(size[1]) * 2**20


@pytest.mark.proof
def test_the_steps_of_the_recipe_make_a_server(services_dir: Path) -> None:
    """One test, since the steps take a minute: what they leave is a server that writes nothing but its data."""
    directory = services_dir / "image"
    directory.mkdir()
    image, made = Build(ROOT, IGNORE, directory), stages(DOCKERFILE.read_text())
    for stage in made:
        image.run(stage)
    assert image.ran == sum(len(stage.all("RUN")) for stage in made) > 0
    assert {path.name for path in image.root.iterdir()} == {"opt", "var"}
    before = listing(image.root / "opt")
    assert sum(size for size, _ in before.values()) < SIZE_MAX
    serves(image, made[-1])
    opens_no_door_by_itself(image, made[-1])
    has_what_stores_need_and_nothing_that_builds(image, made[-1])
    assert listing(image.root / "opt") == before


def serves(image: Build, stage: Stage) -> None:
    with container(image, stage, PERSIST_INSECURE="1") as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert checked(image, stage, url) == 0
        with persist.connect(url) as client:
            shard = client.create_shard("orders", pa.schema([("id", pa.int64())]), key=["id"])
            shard.insert([{"id": 1}, {"id": 2}])
            assert shard.snapshot().to_arrow(expand=True).column("id").to_pylist() == [1, 2]
    assert checked(image, stage, url) != 0


def opens_no_door_by_itself(image: Build, stage: Stage) -> None:
    done = ended(image, stage, stage.command)
    assert done.returncode == 1
    assert "token" in done.stderr


def has_what_stores_need_and_nothing_that_builds(image: Build, stage: Stage) -> None:
    script = (
        "import blob.s3, consensus.postgres, consensus.etcd, importlib.util as u;"
        "print([n for n in ('pip', 'hatchling', 'setuptools', 'pytest', 'pyspark') if u.find_spec(n)])"
    )
    done = ended(image, stage, ["python", "-c", script])
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
