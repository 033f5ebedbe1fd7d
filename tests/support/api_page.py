"""Writes docs/python.md from the docstrings of the public names: `python -m tests.support.api_page`, or `make docs`.

An entry has the signature, the first paragraph of the docstring, and the names of its errors. A member that several
classes have alike is described once.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NewType

import msgspec

import persist
from persist.core import errors as error_tree
from persist.core.errors import PersistError
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "python.md"
WIDTH = 110
_ANYWHERE = ("Unavailable", "Overloaded", "Unauthorized", "Forbidden", "UnknownShard", "Indeterminate")
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):.*?(?=^(?:Args|Returns|Raises|Yields):|^$|\Z)", re.M | re.S)
_NO_ERRORS = re.compile(r" *Raises (?:nothing|what every call may)\.")
_ERRORS = re.compile(r" *\bRaises ((?:[^.`]|`[^`]*`|\.(?=\w))+)\.$", re.S)
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z`])")
_TREE_LINE = re.compile(r"^ +(\w+) {2,}(.+)$", re.M)
_ERROR_NAME = re.compile(r"\b(?:" + "|".join(name for name, _ in _TREE_LINE.findall(error_tree.__doc__ or "")) + r")\b")
_OF_OTHERS = re.compile(r"what (`\w+`) (?:raises|does|says)|what (reading) may")
_INTERNAL = re.compile(
    r"\b(SeqNo|SchemaRecord|ShardBase|Tag|Details|KeyRange|ReaderId|Runner|Split|tuple\[Run, \.\.\.\] =)\b"
)
"""Types that only the packages of persist make: no user gives them."""
_SHARED = {
    "token: str = None", "attributes: AttributeUpdates = ()", "info: Info = None", "where: str = None",
    "columns: Sequence[str] = None", "start_key: Key = None", "end_key: Key = None", "key_prefix: Key = None",
    "as_of: int | datetime = None",
}  # fmt: skip
_FIELDS_ONLY = ("ShardSchema", "Connection")
"""Classes whose methods are for the packages of persist: users make them and read their fields."""

HEAD = """\
# Python

The public names of the package `persist`, generated from its docstrings by `make docs`. An entry has the
signature, the first paragraph of the docstring, and the errors. `help(persist.Shard.insert)` has the rest:
every argument and field, and when each error is raised. A parameter whose default is None takes None too, and
types that a default shows are left out. Start with the [tutorial](tutorial.md).

- Times are integers. An interval `[lower, upper)` contains `lower` and not `upper`.
- Rows are Arrow tables, or anything that converts to one. `__diff` is the multiplicity of a row, `__time` its
  time.
- Every call may raise `Unavailable`, `Overloaded`, `Unauthorized` and `Forbidden`, and every call of a shard
  `UnknownShard`. Entries list the other [errors](#errors). A call that changes something may also raise
  `Indeterminate`: retry it with the same token.
- Parameters that many calls share are shown by their names, and may be omitted: `token: str`, `attributes:
  AttributeUpdates` and `info: Info` of a write; `where: str`, `columns: Sequence[str]`, `start_key`,
  `end_key`, `key_prefix` and `as_of: int | datetime` of a read.
"""


def page() -> str:
    """The whole page."""
    public = {name: getattr(persist, name) for name in persist.__all__ if not name.startswith("__")}
    errors = [value for value in public.values() if inspect.isclass(value) and issubclass(value, PersistError)]
    described = {name: value for name, value in public.items() if value not in errors}
    shared = _shared_members(described.values())
    lines = [HEAD, "| name | what it is |\n| --- | --- |"]
    lines += [f"| {_link(name, value)} | {_one_line(value)} |" for name, value in described.items()]
    lines += ["", "## Members of several classes\n", *sorted(shared), ""]
    for name, value in described.items():
        if _has_section(value):
            lines += [f"## {name}\n", *_described(name, value, shared)]
    return "\n".join([*lines, "## Errors\n", *_errors(errors)]).rstrip() + "\n"


def _has_section(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def _link(name: str, value: Any) -> str:
    return f"[`{name}`](#{name.lower()})" if _has_section(value) else f"`{name}`"


def _described(name: str, value: Any, shared: set[str]) -> Iterator[str]:
    if inspect.isfunction(value):
        yield f"{_entry(name, value)}\n"
        return
    if value is persist.Connection:  # its fields are the arguments of `connect`
        yield from (_filled(" ".join(paragraph.split())) + "\n" for paragraph in _doc(value).split("\n\n"))
    elif (said := " ".join(_parts(_doc(value))).strip()).removesuffix(".") != _one_line(value):
        yield _filled(said) + "\n"
    if (fields := _fields(value)) and not any(map(_INTERNAL.search, fields)):
        yield _filled(f"- fields: `{', '.join(fields)}`")
    for entry in _entries(value):
        if entry not in shared:
            yield entry
    if refused := [f"`{name}`" for name in _members(value) if _is_refused(inspect.getattr_static(value, name))]:
        yield _filled(f"- {', '.join(refused)}: refused. Raises `InvalidUsage`, which says what to do instead.")
    yield ""


# --- members


def _entries(cls: type) -> list[str]:
    if cls.__name__ in _FIELDS_ONLY:
        return []
    members = ((name, inspect.getattr_static(cls, name)) for name in _members(cls))
    return [_entry(name, value) for name, value in members if not _is_refused(value) and not _is_of_shard(cls, value)]


def _is_of_shard(cls: type, value: Any) -> bool:
    """Whether a method of a writer is that of `Shard`, which describes it."""
    return cls is not persist.Shard and getattr(value, "__qualname__", "").startswith("WriteMethods.")


def _is_refused(value: Any) -> bool:
    """Whether a method only says why there is no such method."""
    return inspect.isfunction(value) and inspect.signature(value).return_annotation == "NoReturn"


def _entry(name: str, value: Any) -> str:
    """A function, a method or a property: its signature, what it does, and its errors."""
    text, errors = _parts(_doc(value))
    shown = name if isinstance(value, property) else _line(_function(value), name)
    return _filled(f"- `{shown}`: {text} {errors}".rstrip(" :"))


def _members(cls: type) -> list[str]:
    """Public methods and properties of a class of ours, in the order of the source, those of its bases of ours last."""
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    fields |= set(getattr(cls, "__struct_fields__", ()))
    ours = [base for base in cls.__mro__ if base.__module__.startswith("persist")]
    names = [name for base in ours for name, value in vars(base).items() if _is_documented(name, value)]
    return [name for name in dict.fromkeys(names) if name not in fields]


def _is_documented(name: str, value: Any) -> bool:
    kinds = (property, classmethod, staticmethod)
    if name.startswith("_") or not (inspect.isfunction(value) or isinstance(value, kinds)):
        return False
    return isinstance(value, property) or not _INTERNAL.search(str(inspect.signature(_function(value))))


def _shared_members(values: Iterable[Any]) -> set[str]:
    """Entries that more than one of these classes would have."""
    times = Counter(entry for value in values if inspect.isclass(value) for entry in _entries(value))
    return {entry for entry, count in times.items() if count > 1}


# --- signatures


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def _line(function: Any, name: str) -> str:
    returned = str(inspect.signature(function).return_annotation).removeprefix("c.")
    return f"{name}({', '.join(_parameters(function))})" + ("" if returned == "None" else f" -> {returned}")


def _parameters(function: Any) -> list[str]:
    """The parameters as the source has them, with the star before those that must be named."""
    found: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in found):
            found.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        typed = _typed(parameter.name, str(parameter.annotation), parameter.default, parameter.empty)
        found.append(stars + (parameter.name if typed in _SHARED else typed))
    return found


def _typed(name: str, annotation: str, default: object, missing: object) -> str:
    """A parameter or field with its type and default; the type is left out where the default shows it."""
    if default is missing:
        return f"{name}: {annotation}"
    if type(default).__name__ == annotation:
        return f"{name}={default!r}"
    shown = "..." if default is ... or len(repr(default)) > WIDTH else repr(default)
    return f"{name}: {annotation.removesuffix(' | None') if default is None else annotation} = {shown}"


def _fields(cls: Any) -> list[str]:
    """The public fields of a dataclass or a struct, with their types and defaults."""
    if not dataclasses.is_dataclass(cls):
        return list(cls.__struct_fields__) if issubclass(cls, msgspec.Struct) else []
    found = []
    for field in dataclasses.fields(cls):
        default = ... if field.default_factory is not dataclasses.MISSING else field.default
        if not field.name.startswith("_"):
            found.append(_typed(field.name, str(field.type), default, dataclasses.MISSING))
    return found


# --- docstrings


def _doc(value: Any) -> str:
    """The docstring; nothing for one that only `dataclass` has made."""
    text = inspect.getdoc(value) or ""
    return "" if inspect.isclass(value) and text.startswith(f"{value.__name__}(") else text


def _parts(docstring: str) -> tuple[str, str]:
    """The first paragraph of a docstring, on one line, and the sentence that names its errors."""
    sections = {found[1]: found[0].partition(":")[2] for found in _SECTION.finditer(docstring)}
    text = _SECTION.sub("", docstring)
    blocks = [part for part in text.split("\n\n") if part.strip() and not part.startswith("    ")]
    paragraphs = [" ".join(block.split()) for block in blocks]
    if len(paragraphs) > 1 and not paragraphs[0].endswith((".", ":", "!", "?")):
        paragraphs[:2] = [f"{paragraphs[0]} {paragraphs[1]}"]
    errors = " ".join(sections.get("Raises", "").split()).removesuffix(".")
    for position, paragraph in enumerate(paragraphs):
        shown = _NO_ERRORS.sub("", paragraph)
        if not errors and (found := _ERRORS.search(shown)):
            errors = found[1]
            shown = shown[: found.start()]
        paragraphs[position] = shown.strip()
    return (paragraphs or [""])[0], _raises(errors)


def _raises(text: str) -> str:
    """The errors that a docstring names, without those that every call may raise."""
    names = [name for name in dict.fromkeys(_ERROR_NAME.findall(text)) if name not in _ANYWHERE]
    named = [f"`{name}`" for name in names]
    named += [f"what {first or second} raises" for first, second in _OF_OTHERS.findall(text)]
    return f"Raises {', '.join(named)}." if named else ""


def _one_line(value: Any) -> str:
    """What the table of names says of one: the first sentence of its docstring, or its value."""
    if isinstance(value, NewType):
        return f"a `{value.__supertype__.__name__}` as a type of its own"
    if not _has_section(value):
        return f"the key `{value}`"
    return _SENTENCE_END.split(_parts(_doc(value))[0])[0].removesuffix(".")


def _errors(classes: list[type[PersistError]]) -> Iterator[str]:
    yield "What each one means, and what to do: [troubleshooting](troubleshooting.md#errors-by-kind).\n"
    yield "| class | kind | below | details |\n| --- | --- | --- | --- |"
    for cls in classes:
        above = "" if cls is PersistError else f"`{cls.__mro__[1].__name__}`"
        said = " ".join(inspect.cleandoc(vars(cls).get("__doc__") or "").split())
        details = said.partition("Details")[2].lstrip(":, ").removesuffix(".")
        yield f"| `{cls.__name__}` | `{cls.kind}` | {above} | {details} |"
    yield ""


def _filled(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
