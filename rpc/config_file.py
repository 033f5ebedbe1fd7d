"""Loads the settings of `persist serve`: options take precedence over the `--config` file, variables and defaults.

The file is TOML. All names, types and ranges are checked before anything starts.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from blob import without_secrets
from persist.client.arguments import read_bounded
from persist.core.errors import InvalidUsage
from rpc.settings import DEFAULT_DIRECTORY, PREFIXES, SETTINGS, ServerSettings, Setting, Value, server_settings, shown

FILE_BYTES_MAX = 1 << 20
STORES = ("directory", "blob", "consensus")
CLOSE = 0.75  # similarity from which a name is suggested for a misspelt one
CLOSE_VARIABLES = 0.85
# Variables that other parts of persist read.
VARIABLES_OF_OTHERS = frozenset(("PERSIST_URL", "PERSIST_TOKEN"))
OPTION, FILE, ENVIRONMENT = "an option", "the file", "the environment"
_TABLES = {table: {setting.name: setting for setting in SETTINGS if setting.table == table} for table in PREFIXES}
_VARIABLES = {setting.variable: setting for setting in SETTINGS}
_BOOLS = {"0": False, "1": True, "false": False, "true": True}


@dataclass(frozen=True)
class LoadedConfig:
    """The settings, and the source of each one that is not a default."""

    settings: ServerSettings
    sources: Mapping[Setting, str]


def load(options: Mapping[str, Value], environment: Mapping[str, str], path: str | None = None) -> LoadedConfig:
    """The settings from options (by field of `ServerSettings`), variables, and a file. Combinations are not checked.

    The location in the file replaces that in the environment. An option for one of the two stores replaces that store
    alone, and `--dir` replaces both.

    Raises InvalidUsage naming the variable, or the file with the line and key, that is unreadable or not allowed.
    """
    of_options = {_TABLES[""].get(name) or _TABLES["levers"][name]: value for name, value in options.items()}
    of_file, of_environment = {} if path is None else read_file(path), read_environment(environment)
    if any(setting.name in STORES for setting in of_file):
        of_environment = _without_stores(of_environment, STORES)
    replaced = {setting.name for setting in of_options if setting.name in STORES}
    if replaced:
        dropped = STORES if "directory" in replaced else ("directory",)
        of_file, of_environment = _without_stores(of_file, dropped), _without_stores(of_environment, dropped)
    values: dict[Setting, Value] = {}
    origins: dict[Setting, str] = {}
    for source, of_source in ((ENVIRONMENT, of_environment), (FILE, of_file), (OPTION, of_options)):
        values.update(of_source)
        origins.update(dict.fromkeys(of_source, source))
    return LoadedConfig(server_settings(values), origins)


def _without_stores(values: Mapping[Setting, Value], names: tuple[str, ...]) -> dict[Setting, Value]:
    return {setting: value for setting, value in values.items() if setting.name not in names}


def read_environment(environment: Mapping[str, str]) -> dict[Setting, Value]:
    """The settings from variables: PERSIST_PORT, PERSIST_LIMIT_SNAPSHOTS_MAX, PERSIST_LEVER_LINGER_MS, …

    Raises InvalidUsage naming a variable with an invalid value, or of an unknown limit or lever.
    """
    values: dict[Setting, Value] = {}
    for name, text in environment.items():
        setting = _VARIABLES.get(name)
        if setting is not None:
            values[setting] = _parsed(setting, text)
            continue
        for table, prefix in PREFIXES.items():
            if table and name.startswith(prefix):
                similar = _nearest(name, (variable for variable in _VARIABLES if variable.startswith(prefix)))
                raise InvalidUsage(f"nothing reads the variable {name}{similar}; docs/settings.md lists all variables")
    return values


def _parsed(setting: Setting, text: str) -> Value:
    value: Value = text
    if setting.kind is bool:
        value = _BOOLS.get(text.lower(), text)
    elif setting.kind is int and re.fullmatch(r"[0-9]{1,16}", text):
        value = int(text)
    elif setting.kind is float and re.fullmatch(r"[0-9]{1,16}(\.[0-9]{1,6})?", text):
        value = float(text)
    if (refusal := setting.refusal(value)) is not None:
        raise InvalidUsage(f"the variable {setting.variable} {refusal}")
    return value


def read_file(path: str) -> dict[Setting, Value]:
    """The settings in a file. Raises InvalidUsage with the file, line and key of what is not allowed."""
    text = _text_of(path)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidUsage(f"{path} is not TOML: {error}") from error
    except RecursionError as error:
        raise InvalidUsage(f"{path} is nested too deeply") from error
    except ValueError as error:  # an integer with too many digits for Python
        raise InvalidUsage(f"{path} has an unreadable value: {error}") from error
    tables: dict[str, dict[str, object]] = {"": {}}
    for name, value in content.items():
        if (not isinstance(value, dict) or name in _TABLES[""]) and name not in _TABLES:
            tables[""][name] = value
        else:
            if name not in _TABLES or not name:
                raise _refused(path, text, "", name, f"is not a known table{_nearest(name, _TABLES)}")
            if not isinstance(value, dict):
                raise _refused(path, text, "", name, f"is {shown(value)} and must be a table")
            tables[name] = value
    values: dict[Setting, Value] = {}
    for table, of_table in tables.items():
        for name, value in of_table.items():
            setting, refusal = _TABLES[table].get(name), None
            if setting is None or setting.is_secret:
                refusal = _why_unknown(table, name, setting)
            elif setting.kind is str and value == "":
                refusal = "is empty: give a value, or leave it out"
            else:
                refusal = setting.refusal(value)
            if setting is None or refusal is not None:
                raise _refused(path, text, table, name, str(refusal))
            values[setting] = value
    return values


def _why_unknown(table: str, name: str, secret: Setting | None) -> str:
    if secret is not None:
        return f"is a secret: set the variable {secret.variable} instead"
    elsewhere = next((other for other, of in _TABLES.items() if name in of), None)
    where = "" if elsewhere is None else f"; it belongs to {_table(elsewhere)}"
    return f"is not a setting of {_table(table)}{where or _nearest(name, _TABLES[table])}"


def _table(name: str) -> str:
    return f"[{name}]" if name else "the part before the first table"


def _text_of(path: str) -> str:
    try:
        return read_bounded(f"the configuration {path}", path, FILE_BYTES_MAX).decode()
    except UnicodeDecodeError as error:
        raise InvalidUsage(f"{path} is not UTF-8") from error


def _refused(path: str, text: str, table: str, name: str, problem: str) -> InvalidUsage:
    key = f"{table}.{name}" if table else name
    line = _line_of(text, table, name)
    return InvalidUsage(f"{path}{f', line {line}' if line else ''}: {key} {problem}")


def _line_of(text: str, table: str, name: str) -> int | None:
    """The line on which a key or table begins; None: it is not written on one line."""
    current, quoted = "", rf"\s*[\"']?{re.escape(name)}[\"']?\s*[=.]"
    inline = rf"\s*{re.escape(table)}\s*(\.\s*{re.escape(name)}\s*)?="
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*\"?([^\]\"]+?)\"?\s*\]", line):
            current = header[1]
            if not table and current == name:
                return number
        elif (current == table and re.match(quoted, line)) or (table and re.match(inline, line)):
            return number
    return None


def _nearest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, [other for other in known if other], 1, CLOSE)
    return f"; did you mean {close[0]}?" if close else ""


def misspelt(environment: Iterable[str]) -> list[tuple[str, str]]:
    """The variables `PERSIST_…` that nothing reads, each with the one that was probably meant."""
    known = {*_VARIABLES, *VARIABLES_OF_OTHERS}
    return sorted(
        (name, close[0])
        for name in environment
        if name.startswith(PREFIXES[""]) and name not in known
        if (close := get_close_matches(name, known, 1, CLOSE_VARIABLES))
    )


def effective_settings(loaded: LoadedConfig) -> Iterator[str]:
    """A line for each setting with its value and source; together they are a valid configuration file."""
    settings = loaded.settings
    for table, of_table in _TABLES.items():
        if table:
            yield f"\n[{table}]"
        for name, setting in of_table.items():
            if setting.is_secret:
                continue
            value = setting.value_in(settings)
            if name == "directory" and not (settings.directory or settings.blob or settings.consensus):
                value = DEFAULT_DIRECTORY
            if name in STORES and isinstance(value, str):
                value = without_secrets(value)
            source = loaded.sources.get(setting, "default")
            yield f"# {name} is not set" if value in (None, "") else f"{name} = {json.dumps(value)}  # {source}"
    for setting in SETTINGS:
        if setting.is_secret:
            yield f"# {setting.name}: {'set' if setting.value_in(settings) else 'not set'}"
