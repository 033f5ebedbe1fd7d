"""Writes docs/python.md from the docstrings of the public names: `python -m tests.support.api_page`, or `make docs`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NewType

import msgspec

import persist
from persist.core.errors import PersistError
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "python.md"
WIDTH = 110
_SECTION = re.compile(r"(Args|Returns|Raises|Yields): ?(.*)")
_ARGUMENT = re.compile(r"    (\*{0,2}\w+): (.*)")

HEAD = """\
# Python

This page is made from the docstrings of the code by `make docs`, and a test compares the two. It has every
public name of the package `persist`. The [tutorial](tutorial.md) shows how they are used together.

- Times are whole numbers. An interval `[lower, upper)` holds `lower` and not `upper`.
- Rows are Arrow tables or what can become one. The column `__diff` says how often a row comes, `__time` when.
- Errors are those of [one tree](#errors). [Troubleshooting](troubleshooting.md) says what to do about each.
"""


def page() -> str:
    """The whole page."""
    public = [name for name in persist.__all__ if not name.startswith("__")]
    found = {name: getattr(persist, name) for name in public}
    errors = [name for name, value in found.items() if inspect.isclass(value) and issubclass(value, PersistError)]
    lines = [HEAD]
    for name, value in found.items():
        if name not in errors:
            lines += [f"## {name}\n", *_described(name, value)]
    lines += ["## Errors\n", *_errors([found[name] for name in errors])]
    return "\n".join(lines).rstrip() + "\n"


def _described(name: str, value: Any) -> Iterator[str]:
    if inspect.isfunction(value):
        yield from _callable(name, value)
    elif inspect.isclass(value):
        yield from _text(inspect.getdoc(value) or "")
        if dataclasses.is_dataclass(value):
            yield from _fields(value)
        elif issubclass(value, msgspec.Struct):
            yield "Fields: " + ", ".join(f"`{field}`" for field in value.__struct_fields__) + ".\n"
        for member in _members(value):
            yield from _member(name, member, inspect.getattr_static(value, member))
    elif isinstance(value, NewType):
        yield f"A `{value.__supertype__.__name__}`, under a name that says what it is.\n"
    else:
        yield f"`{value!r}`\n"


def _members(cls: type) -> list[str]:
    """Public methods and properties of a class of ours, in the order of the source, those of its bases of ours last."""
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    fields |= set(getattr(cls, "__struct_fields__", ()))
    ours = [base for base in cls.__mro__ if base.__module__.startswith("persist")]
    names = [name for base in ours for name, value in vars(base).items() if _is_documented(name, value)]
    return [name for name in dict.fromkeys(names) if name not in fields]


def _is_documented(name: str, value: Any) -> bool:
    kinds = (property, classmethod, staticmethod)
    return not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))


def _member(owner: str, name: str, value: Any) -> Iterator[str]:
    yield f"### {owner}.{name}\n"
    if isinstance(value, property):
        yield from _text(inspect.getdoc(value) or "")
    else:
        yield from _callable(name, value.__func__ if isinstance(value, classmethod | staticmethod) else value)


def _callable(name: str, function: Any) -> Iterator[str]:
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    returned = inspect.signature(function).return_annotation
    shown = [_shown(parameter) for parameter in parameters]
    line = f"{name}({', '.join(_with_star(parameters, shown))}) -> {returned}"
    if len(line) > WIDTH:
        body = "".join(f"    {part},\n" for part in _with_star(parameters, shown))
        line = f"{name}(\n{body}) -> {returned}"
    yield f"```text\n{line}\n```\n"
    yield from _text(inspect.getdoc(function) or "")


def _shown(parameter: inspect.Parameter) -> str:
    """One parameter as the source has it: annotations are text there."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}: {parameter.annotation}{default}"


def _with_star(parameters: list[inspect.Parameter], shown: list[str]) -> list[str]:
    """The parameters as they are written, with the star before those that must be named."""
    found: list[str] = []
    for parameter, text in zip(parameters, shown, strict=True):
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found and not any(t.startswith("*") for t in found):
            found.append("*")
        found.append(text)
    return found


def _fields(cls: Any) -> Iterator[str]:
    """The settings of a dataclass with their defaults."""
    fields = [field for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    if not fields:
        return
    yield "| field | type | default |\n| --- | --- | --- |"
    for field in fields:
        if field.default is not dataclasses.MISSING:
            default = f"`{field.default!r}`"
        else:
            default = "its defaults" if field.default_factory is not dataclasses.MISSING else "must be given"
        kind = str(field.type).replace("|", "\\|")
        yield f"| `{field.name}` | `{kind}` | {default} |"
    yield ""


def _errors(classes: list[type[PersistError]]) -> Iterator[str]:
    yield "| class | kind | below |\n| --- | --- | --- |"
    for cls in classes:
        above = "" if cls is PersistError else f"`{cls.__mro__[1].__name__}`"
        yield f"| `{cls.__name__}` | `{cls.kind}` | {above} |"
    yield ""
    for cls in classes:
        said = vars(cls).get("__doc__")
        if said:
            yield from _text(f"**{cls.__name__}**: {inspect.cleandoc(said)}")


def _text(docstring: str) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, examples as code, arguments as a list, what is raised in bold."""
    blocks: list[tuple[str, list[str]]] = []
    kind = "text"
    for line in docstring.splitlines():
        section = _SECTION.fullmatch(line)
        argument = _ARGUMENT.fullmatch(line)
        if section:
            kind = section[1]
            blocks.append((kind, [f"**{kind}**: {section[2]}".rstrip()]))
        elif kind == "Args" and argument:
            blocks.append(("item", [f"`{argument[1]}`: {argument[2]}"]))
        elif not line.strip():
            if not _is_mid_sentence(blocks):
                kind = "text"
                blocks.append((kind, []))
        elif kind == "text" and line.startswith("    "):
            if not blocks or blocks[-1][0] != "code":
                blocks.append(("code", []))
            blocks[-1][1].append(line[4:])
        else:
            if not blocks or blocks[-1][0] == "code":
                blocks.append((kind, []))
            blocks[-1][1].append(line.strip())
    yield from _markdown([(kind, lines) for kind, lines in blocks if lines])


def _is_mid_sentence(blocks: list[tuple[str, list[str]]]) -> bool:
    """Whether an empty line only sets the first line of a docstring apart from the rest of its sentence."""
    return len(blocks) == 1 and blocks[0][0] == "text" and not blocks[0][1][-1].endswith((".", ":", "!", "?"))


def _markdown(blocks: list[tuple[str, list[str]]]) -> Iterator[str]:
    for position, (kind, lines) in enumerate(blocks):
        following = blocks[position + 1][0] if position + 1 < len(blocks) else ""
        if kind == "code":
            yield "\n".join(["```text", *lines, "```"]) + "\n"
        elif kind == "item":
            yield _filled(lines, "- ") + ("" if following == "item" else "\n")
        else:
            yield _filled(lines, "") + "\n"


def _filled(lines: list[str], bullet: str) -> str:
    indent = " " * len(bullet)
    wrapped = textwrap.wrap(
        " ".join(lines),
        WIDTH,
        initial_indent=bullet,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapped)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
