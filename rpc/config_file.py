"""The file of `persist serve --config`: TOML, of which every name, type and range is checked before anything starts.

What it says is put in the place of the environment's variables of the same meaning. So options come before the file,
the file before the environment, and that before the defaults. Processes that the server starts find it there as well.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from blob import without_secrets
from persist.core.errors import InvalidUsage
from persist.regions.fencing import FENCE_S_MAX
from rpc.levers import LEVER_PREFIX, LEVERS
from rpc.settings import (
    DEFAULT_DIRECTORY,
    LIMIT_PREFIX,
    SHUTDOWN_S_MAX,
    VARIABLES_OF_OTHERS,
    Limits,
    ServerSettings,
)

FILE_BYTES_MAX = 1 << 20
PREFIX = "PERSIST_"
STORES = ("directory", "blob", "consensus")
CLOSE = 0.75  # how alike two names are, of which one may be meant for the other
LIMIT_END = 1 << 50

# Of whole numbers, `[least, most]`. What else a setting has to be is checked with all the others.
RANGES = {
    "port": (0, 65_535),
    "maintenance_metrics_port": (0, 65_535),
    "self_fence": (0, int(FENCE_S_MAX)),
    "publish_every": (0, 3_600),
    "presigned_s": (1, 600),
    "shutdown_s": (1, SHUTDOWN_S_MAX),
}
SECRET = ("maintenance_token", "index_token", "home_token")  # a variable of each gives it
NOT_SETTINGS = ("limits", "policy", *SECRET)


@dataclass(frozen=True, slots=True)
class Key:
    """What a key of the file takes. `kind` is int, float, bool or str; numbers lie in `[least, most]`."""

    variable: str
    kind: type
    least: float = 0
    most: float = 0

    def refusal(self, value: object) -> str | None:
        """What is wrong with a value, and what is allowed; None: nothing."""
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            return f"is {_kind_of(value)} and must be {_NAMES[self.kind]}{self._range()}"
        if self.kind is str and not value:
            return "is empty: give a value, or leave it out"
        if self.kind in (int, float) and not self.least <= value <= self.most:  # type: ignore[operator]
            return f"is {value} and must be in [{self.least}, {self.most}]"
        return None

    def _range(self) -> str:
        return f" in [{self.least}, {self.most}]" if self.kind in (int, float) else ""


_NAMES: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def keys() -> dict[str, dict[str, Key]]:
    """All keys that a file may have, by table. "" is what stands before the first table."""
    kinds: dict[str, type] = {"int": int, "float": float, "bool": bool}
    plain: dict[str, Key] = {}
    levers = {lever.name: Key(LEVER_PREFIX + lever.name.upper(), int, lever.least, lever.most) for lever in LEVERS}
    for setting in fields(ServerSettings):
        if setting.name in NOT_SETTINGS or setting.name in levers:
            continue
        kind = kinds.get(str(setting.type), str)
        plain[setting.name] = Key(PREFIX + setting.name.upper(), kind, *RANGES.get(setting.name, ()))
    limits = {}
    for limit in fields(Limits):
        kind = kinds[str(limit.type)]
        most = 100 if limit.name.endswith("_percent") else LIMIT_END - 1
        limits[limit.name] = Key(LIMIT_PREFIX + limit.name.upper(), kind, 1 if kind is int else 1e-6, most)
    return {"": plain, "limits": limits, "levers": levers}


def read_config(path: str) -> dict[str, str]:
    """The variables of the environment that mean what the file says.

    Raises InvalidUsage with the file, its line and the key: it cannot be read, is no TOML, or has what is not allowed.
    """
    text = _text_of(path)
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidUsage(f"{path} is no TOML: {error}") from error
    except RecursionError as error:
        raise InvalidUsage(f"{path} is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits, which Python does not read
        raise InvalidUsage(f"{path} has a value that cannot be read: {error}") from error
    known = keys()
    tables: dict[str, dict[str, object]] = {"": {}}
    for name, value in found.items():
        if (not isinstance(value, dict) or name in known[""]) and name not in known:
            tables[""][name] = value
        else:
            if name not in known or not name:
                raise _refused(path, text, "", name, f"is no table that it may have{_nearest(name, known)}")
            if not isinstance(value, dict):
                raise _refused(path, text, "", name, f"is {_kind_of(value)} and must be a table")
            tables[name] = value
    variables: dict[str, str] = {}
    for table, values in tables.items():
        for name, value in values.items():
            variables[_variable(path, text, known, table, name, value)] = _written(value)
    return variables


def _variable(
    path: str, text: str, known: Mapping[str, Mapping[str, Key]], table: str, name: str, value: object
) -> str:
    """The variable that a key stands for. Raises InvalidUsage: there is no such key, or the value is not allowed."""
    key = known[table].get(name)
    if key is None:
        if name in SECRET and not table:
            said = f"is a secret: give it by the variable {PREFIX}{name.upper()}"
        else:
            elsewhere = next((other for other, of in known.items() if name in of), None)
            where = "" if elsewhere is None else f"; it belongs to {_table(elsewhere)}"
            said = f"is no setting of {_table(table)}{where or _nearest(name, known[table])}"
        raise _refused(path, text, table, name, said)
    if (refusal := key.refusal(value)) is not None:
        raise _refused(path, text, table, name, refusal)
    return key.variable


def _table(name: str) -> str:
    return f"[{name}]" if name else "the part before the first table"


def _text_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise InvalidUsage(f"{path} is longer than {FILE_BYTES_MAX} bytes: it is no configuration")
        return data.decode()
    except OSError as error:
        raise InvalidUsage(f"the configuration {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidUsage(f"{path} is not UTF-8") from error


def _refused(path: str, text: str, table: str, name: str, said: str) -> InvalidUsage:
    shown = f"{table}.{name}" if table else name
    line = _line_of(text, table, name)
    return InvalidUsage(f"{path}{f', line {line}' if line else ''}: {shown} {said}")


def _line_of(text: str, table: str, name: str) -> int | None:
    """The line on which a key, or a table of that name, begins; None: it is written otherwise than on one line."""
    at, quoted = "", rf"\s*[\"']?{re.escape(name)}[\"']?\s*[=.]"
    inline = rf"\s*{re.escape(table)}\s*(\.\s*{re.escape(name)}\s*)?="
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*\"?([^\]\"]+?)\"?\s*\]", line):
            at = header[1]
            if not table and at == name:
                return number
        elif (at == table and re.match(quoted, line)) or (table and re.match(inline, line)):
            return number
    return None


def _kind_of(value: object) -> str:
    shown = repr(value) if len(repr(value)) <= 60 else f"{str(value)[:57]}..."
    return shown.lower() if isinstance(value, bool) else shown


def _written(value: object) -> str:
    """A value as a variable of the environment has it."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, [one for one in known if one], 1, CLOSE)
    return f"; did you mean {close[0]}?" if close else ""


def put_into(environment: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    """What a file says takes the place of what the environment says. A location takes that of another one."""
    stores = {f"{PREFIX}{name.upper()}" for name in STORES}
    if stores & variables.keys():
        for name in stores:
            environment.pop(name, None)
    environment.update(variables)


def misspelt(environment: Iterable[str]) -> list[tuple[str, str]]:
    """The variables `PERSIST_…` that nothing reads, each with one that it may have been meant for."""
    known = {key.variable for table in keys().values() for key in table.values()} | VARIABLES_OF_OTHERS
    known |= {f"{PREFIX}{name.upper()}" for name in SECRET}
    found = []
    for name in environment:
        if name.startswith(PREFIX) and name not in known and (close := get_close_matches(name, known, 1, 0.85)):
            found.append((name, close[0]))
    return sorted(found)


def in_force(
    settings: ServerSettings, options: Container[str], config: Container[str], environment: Container[str]
) -> Iterator[str]:
    """A line for each setting: what it is, and where that comes from. Together they are such a file again.

    `options` are the settings that options gave, `config` the variables that the file stands for.
    """
    for table, of in keys().items():
        if table:
            yield f"\n[{table}]"
        for name, key in of.items():
            source = "default"
            if name in options and not table:
                source = "an option"
            elif key.variable in config:
                source = "the file"
            elif key.variable in environment:
                source = "the environment"
            value = _value_of(settings, table, name)
            if not table and name == "directory" and not (settings.directory or settings.blob or settings.consensus):
                value = DEFAULT_DIRECTORY
            yield f"# {name} is not set" if value in (None, "") else f"{name} = {_toml(value)}  # {source}"
    for name in SECRET:
        yield f"# {name}: {'set' if getattr(settings, name) else 'not set'}"


def _value_of(settings: ServerSettings, table: str, name: str) -> object:
    if table == "limits":
        return getattr(settings.limits, name)
    value = getattr(settings if hasattr(settings, name) else settings.policy, name)
    return without_secrets(value) if table == "" and name in STORES and value else value


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else str(value)
