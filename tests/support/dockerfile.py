"""A Dockerfile without an engine: what it says, and its steps run one by one in a directory that stands for the root.

What runs is what the file says: the same commands, with every absolute path moved below that directory, and `python`
being the interpreter of the tests. The base images, the layers, the users and the network of an engine are not there.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

_ABSOLUTE = re.compile(r"(?<![\w:/.=-])/(?=\w)")  # the first slash of a path in a command
STEP_S = 1800.0  # a step that takes longer never ends


@dataclass
class Stage:
    """What stands from one FROM to the next."""

    base: str
    name: str | None
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [rest for word, rest in self.steps if word == instruction]

    def last(self, instruction: str) -> str | None:
        return (self.all(instruction) or [None])[-1]

    @property
    def environment(self) -> dict[str, str]:
        pairs = [pair.partition("=") for rest in self.all("ENV") for pair in shlex.split(rest)]
        return {name: value for name, _, value in pairs}

    @property
    def command(self) -> list[str]:
        """What a container runs where nothing else is said."""
        return [*json.loads(self.last("ENTRYPOINT") or "[]"), *json.loads(self.last("CMD") or "[]")]

    @property
    def health_check(self) -> list[str]:
        check = self.last("HEALTHCHECK")
        return [] if check is None else list(json.loads(check.partition("CMD ")[2]))


def stages(text: str) -> list[Stage]:
    """The stages of a Dockerfile, in order. AssertionError: it does not begin with FROM."""
    found: list[Stage] = []
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name or None))
        elif instruction:
            assert found, f"{instruction} stands before the first FROM"
            found[-1].steps.append((instruction, rest.strip()))
    return found


def is_ignored(path: str, patterns: str) -> bool:
    """Whether a .dockerignore keeps this path of the context out: the last pattern that fits it, or what it is in."""
    ignored = False
    for line in patterns.splitlines():
        pattern = line.removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = path.split("/")
        above = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        deep = pattern.removeprefix("**/")
        names = [each.rpartition("/")[2] for each in above] if deep != pattern else above
        if any(fnmatch.fnmatchcase(name, deep) for name in names):
            ignored = not line.startswith("!")
    return ignored


class Build:
    """The stages of a Dockerfile, run one after the other. `root`: what the last one holds, once it has run."""

    def __init__(self, context: Path, ignore: str, directory: Path) -> None:
        self.context, self.root, self.ran = context, directory / "root", 0
        self._ignore, self._directory = ignore, directory
        self._done: dict[str, Path] = {}

    def run(self, stage: Stage) -> None:
        """Run a stage in an empty root. What the one before has made lies elsewhere from then on, as with an engine.

        Every root has the same path while its stage runs, since programs of Python name their interpreter by it.
        """
        self.root.mkdir()
        at = Path("/")
        for instruction, rest in stage.steps:
            if instruction == "WORKDIR":
                at = Path(rest)
                self._inside(at).mkdir(parents=True, exist_ok=True)
            elif instruction == "COPY":
                self._copy(rest.split(), at)
            elif instruction == "RUN":
                self._run(rest, at)
        if stage.name is not None:
            self._done[stage.name] = self._directory / stage.name
            self.root.rename(self._done[stage.name])

    def moved(self, text: str) -> str:
        """A command, or a search path, with each absolute path below the root."""
        return _ABSOLUTE.sub(f"{self.root}/", text)

    def _inside(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def _run(self, command: str, at: Path) -> None:
        command = re.sub(r"(^|&& *)python ", rf"\1{shlex.quote(interpreter())} ", self.moved(command))
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PERSIST_", "VIRT"))
        }
        done = subprocess.run(
            ["/bin/sh", "-ec", command],
            cwd=self._inside(at),
            env=kept,
            capture_output=True,
            text=True,
            check=False,
            timeout=STEP_S,
        )
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        self.ran += 1

    def _copy(self, words: list[str], at: Path) -> None:
        options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        for source in sources:
            if (stage := options.get("from")) is not None:
                path = self._done[stage] / source.lstrip("/")
            else:
                assert not is_ignored(source, self._ignore), f"COPY {source}: .dockerignore keeps it out"
                path = self.context / source
            to = self._inside(at / target)
            if path.is_dir():
                # What a stage has made nobody changes any more, so links stand for copies.
                copy = os.link if "from" in options else shutil.copy2
                shutil.copytree(path, to, symlinks=True, ignore=self._kept_out, dirs_exist_ok=True, copy_function=copy)
            else:
                to = to / path.name if target.endswith("/") else to
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)
            if (owner := options.get("chown")) is not None and os.getuid() == 0:
                os.chown(to, *map(int, owner.split(":")))

    def _kept_out(self, directory: str, names: list[str]) -> list[str]:
        """Of what the context has; what a stage has made is copied as it is."""
        if not Path(directory).is_relative_to(self.context) or Path(directory).is_relative_to(self._directory):
            return []
        at = Path(directory).relative_to(self.context)
        return [name for name in names if is_ignored((at / name).as_posix(), self._ignore)]


def interpreter() -> str:
    """What stands for the `python` of a base image: ours, and not that of our environment."""
    return str(getattr(sys, "_base_executable", sys.executable))
