"""`where`: a small SQL predicate that is evaluated exactly as in Spark or rejected, with the same syntax in every API.

    predicate := comparisons with AND, OR, NOT and parentheses
    comparison := column (= | == | <> | != | < | <= | > | >= | <=>) literal | column [NOT] IN (literal, ...)
                | column [NOT] BETWEEN literal AND literal | column [NOT] LIKE 'prefix%' | column IS [NOT] NULL | column
    literal := 12 | 1.5 | 1e3 | 'text' | r'C:\\text' | TRUE | FALSE | NULL | DATE '2024-01-31'
             | TIMESTAMP '2024-01-31 12:00:00Z' (the offset is required) | TIMESTAMP_NTZ '2024-01-31 12:00:00'
               (or with T in place of the blank)
    column := word | `any name`

The condition of a merge refers to columns as `source.word` and `target.word`, and can also compare two columns.
Elsewhere a dot is a struct field in Spark, which is not supported here: quote the name of a column with a dot in
backquotes.

A text with a backslash is written as a raw string of Spark, because Spark and standard SQL interpret plain ones
differently. In a pattern of LIKE a backslash is Spark's escape: `\\\\`, `\\%` and `\\_` are literal characters.

Types are strict: comparisons for which Spark would use a lossy conversion are rejected. NaN is greater than every
number, as in Spark; comparisons with null are null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal

from persist.core.errors import InvalidUsage

COMPARISONS = {"=": "=", "==": "=", "<>": "<>", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "<=>": "<=>"}
MIRRORED = {"=": "=", "<>": "<>", "<": ">", "<=": ">=", ">": "<", ">=": "<=", "<=>": "<=>"}
PREDICATE_CHARS_MAX = 100_000
DEPTH_MAX = 100
DECIMAL_DIGITS_MAX = 38
_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^'\\]|'')*')|(?P<raw>[rR]'[^']*'(?!'))"
    r"|(?P<number>-?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)(?![A-Za-z_0-9.])"
    r"|(?P<quoted>`[^`]+`)|(?P<word>[A-Za-z_][A-Za-z_0-9]*)|(?P<op><=>|<=|>=|<>|!=|==|=|<|>|\(|\)|,|\.))"
)
_WORDS = frozenset(
    ("AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "IS", "NULL", "TRUE", "FALSE", "DATE", "TIMESTAMP", "TIMESTAMP_NTZ")
)
_ESCAPED = re.compile(r"\\(.)")
_PREFIX = re.compile(r"(?P<body>(?:[^\\%_]|\\[\\%_])*)(?P<rest>%?)\Z")
_PLAIN_INTEGER = re.compile(r"-?\d+\Z")


@dataclass(frozen=True)
class Literal:
    """`kind` is integer, decimal, double, string, boolean, null, date, instant or local; `text` is the source text."""

    kind: str
    text: str


@dataclass(frozen=True)
class Compare:
    column: str
    op: str
    value: Literal


@dataclass(frozen=True)
class CompareColumns:
    """A comparison of two columns in the condition of a merge."""

    column: str
    op: str
    other: str


@dataclass(frozen=True)
class In:
    column: str
    values: tuple[Literal, ...]


@dataclass(frozen=True)
class StartsWith:
    column: str
    prefix: str


@dataclass(frozen=True)
class IsNull:
    column: str


@dataclass(frozen=True)
class Truth:
    """A boolean column as a condition."""

    column: str


@dataclass(frozen=True)
class Not:
    operand: Predicate


@dataclass(frozen=True)
class And:
    operands: tuple[Predicate, ...]


@dataclass(frozen=True)
class Or:
    operands: tuple[Predicate, ...]


Leaf = Compare | CompareColumns | In | StartsWith | IsNull | Truth
Predicate = Leaf | Not | And | Or


def parse(text: str, sides: tuple[str, ...] = ()) -> Predicate:
    """Parse a predicate. Raises InvalidUsage for unknown syntax.

    `sides` are the qualifiers of columns in the condition of a merge.
    """
    if len(text) > PREDICATE_CHARS_MAX:
        raise InvalidUsage(f"where has {len(text)} characters; at most {PREDICATE_CHARS_MAX}")
    parser = _Parser(list(_tokens(text)), sides)
    predicate = parser.disjunction()
    parser.end()
    return predicate


def columns_of(predicate: Predicate) -> list[str]:
    """The columns that the predicate depends on, each once."""
    columns: dict[str, None] = {}
    for leaf in leaves(predicate):
        columns[leaf.column] = None
        if isinstance(leaf, CompareColumns):
            columns[leaf.other] = None
    return list(columns)


def leaves(predicate: Predicate) -> Iterator[Leaf]:
    """The conditions that AND, OR and NOT combine."""
    pending: list[Predicate] = [predicate]
    while pending:
        node = pending.pop(0)
        if isinstance(node, Not):
            pending.append(node.operand)
        elif isinstance(node, (And, Or)):
            pending.extend(node.operands)
        else:
            yield node


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    end = len(text.rstrip())
    is_field = False  # after a dot
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            rest = text[position:]
            raise InvalidUsage(f"where has a syntax error at {rest[:20]!r}{_remedy(rest)}")
        kind = str(match.lastgroup)
        value = match.group(kind)
        if kind == "word" and value.upper() in _WORDS and not is_field:
            kind, value = "keyword", value.upper()
        is_field = value == "."
        yield kind, value
        position = match.end()


def _remedy(rest: str) -> str:
    """A hint for common mistakes."""
    rest = rest.lstrip()
    if rest.startswith('"'):
        return ": write texts in single quotes ('de'), and names of columns in backquotes (`order-id`)"
    if rest.startswith("'"):
        return (
            ": a text ends with a single quote; double the quotes within it ('O''Brien'), and write a text with a "
            r"backslash as r'C:\Users'"
        )
    if rest.startswith(("-", "+", "/", "*", "%")):
        return ": arithmetic is not supported; quote a column name with such a sign in backquotes (`order-id`)"
    return ""


def _unquote(text: str) -> str:
    return text[1:-1].replace("''", "'")


@dataclass
class _Parser:
    tokens: list[tuple[str, str]]
    sides: tuple[str, ...]
    position: int = 0
    depth: int = field(default=0)

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.position] if self.position < len(self.tokens) else ("end", "")

    def next(self) -> tuple[str, str]:
        token = self.peek()
        self.position += 1
        return token

    def take(self, kind: str, value: str) -> bool:
        if self.peek() == (kind, value):
            self.position += 1
            return True
        return False

    def expect(self, kind: str, value: str) -> None:
        if not self.take(kind, value):
            raise self.error(value)

    def error(self, wanted: str) -> InvalidUsage:
        actual = self.peek()[1] or "the end"
        return InvalidUsage(f"where has {actual!r} instead of {wanted}")

    def end(self) -> None:
        if self.peek()[0] != "end":
            raise self.error("AND, OR or the end")

    def disjunction(self) -> Predicate:
        operands = [self.conjunction()]
        while self.take("keyword", "OR"):
            operands.append(self.conjunction())
        return operands[0] if len(operands) == 1 else Or(tuple(operands))

    def conjunction(self) -> Predicate:
        operands = [self.negation()]
        while self.take("keyword", "AND"):
            operands.append(self.negation())
        return operands[0] if len(operands) == 1 else And(tuple(operands))

    def negation(self) -> Predicate:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise InvalidUsage(f"where is nested deeper than {DEPTH_MAX}")
        try:
            if self.take("keyword", "NOT"):
                return Not(self.negation())
            if self.take("op", "("):
                inner = self.disjunction()
                self.expect("op", ")")
                return inner
            return self.comparison()
        finally:
            self.depth -= 1

    def comparison(self) -> Predicate:
        if self.peek()[0] not in ("word", "quoted"):
            value = self.literal()
            op = self.operator()
            return Compare(self.column(), MIRRORED[op], value)
        column = self.column()
        if self.take("keyword", "IS"):
            negated = self.take("keyword", "NOT")
            self.expect("keyword", "NULL")
            return Not(IsNull(column)) if negated else IsNull(column)
        negated = self.take("keyword", "NOT")
        membership = self.membership(column)
        if membership is not None:
            return Not(membership) if negated else membership
        if negated:
            raise self.error("IN, BETWEEN or LIKE")
        if self.peek()[0] == "op" and self.peek()[1] in COMPARISONS:
            op = self.operator()
            if self.sides and self.peek()[0] in ("word", "quoted"):
                return CompareColumns(column, op, self.column())
            return Compare(column, op, self.literal())
        return Truth(column)

    def membership(self, column: str) -> Predicate | None:
        if self.take("keyword", "IN"):
            self.expect("op", "(")
            values = [self.literal()]
            while self.take("op", ","):
                values.append(self.literal())
            self.expect("op", ")")
            return In(column, tuple(values))
        if self.take("keyword", "BETWEEN"):
            low = self.literal()
            self.expect("keyword", "AND")
            return And((Compare(column, ">=", low), Compare(column, "<=", self.literal())))
        if self.take("keyword", "LIKE"):
            return self.like(column)
        return None

    def like(self, column: str) -> Predicate:
        pattern = self.literal()
        match = _PREFIX.match(pattern.text)
        if pattern.kind != "string" or match is None:
            raise InvalidUsage(f"where supports only LIKE 'prefix%', not {pattern.text!r}")
        body = _ESCAPED.sub(r"\1", match["body"])
        return StartsWith(column, body) if match["rest"] else Compare(column, "=", Literal("string", body))

    def operator(self) -> str:
        kind, value = self.next()
        if kind != "op" or value not in COMPARISONS:
            self.position -= 1
            raise self.error("a comparison")
        return COMPARISONS[value]

    def column(self) -> str:
        names = [self.name()]
        while self.take("op", "."):
            names.append(self.name())
        if len(names) == 1 or (len(names) == 2 and names[0] in self.sides):
            return ".".join(names)
        raise InvalidUsage(
            f"where has {'.'.join(names)!r}, a struct field, which is not supported; quote the name of a column with a "
            f"dot in backquotes (`{'.'.join(names)}`)"
        )

    def name(self) -> str:
        kind, value = self.next()
        if kind == "quoted":
            return value[1:-1]
        if kind == "word":
            return value
        self.position -= 1
        raise self.error("a column")

    def literal(self) -> Literal:
        kind, value = self.next()
        if kind == "string":
            return Literal("string", _unquote(value))
        if kind == "raw":
            return Literal("string", value[2:-1])
        if kind == "number":
            return _number(value)
        if kind == "keyword" and value in ("TRUE", "FALSE"):
            return Literal("boolean", value)
        if kind == "keyword" and value == "NULL":
            return Literal("null", value)
        typed = {"DATE": "date", "TIMESTAMP": "instant", "TIMESTAMP_NTZ": "local"}
        if kind == "keyword" and value in typed and self.peek()[0] == "string":
            return Literal(typed[value], _unquote(self.next()[1]))
        self.position -= 1
        raise self.error("a literal")


def _number(text: str) -> Literal:
    """Raises InvalidUsage if a double becomes infinite or zero, or a decimal has more digits than Spark supports."""
    if "e" in text.lower():
        if math.isinf(number := float(text)):
            raise InvalidUsage(f"where has the number {text[:40]}, which is larger than any double")
        if not number and text.lower().split("e")[0].strip("+-0."):
            raise InvalidUsage(f"where has the number {text[:40]}, which would become 0 as a double: write 0")
        return Literal("double", text)
    if _PLAIN_INTEGER.match(text):
        return Literal("integer", text)
    _, digits, exponent = Decimal(text).as_tuple()
    if max(len(digits), -int(exponent)) > DECIMAL_DIGITS_MAX:
        raise InvalidUsage(f"where has the number {text[:40]}..., of more than {DECIMAL_DIGITS_MAX} digits")
    return Literal("decimal", text)


def conjuncts(predicate: Predicate) -> list[Predicate]:
    """The conditions that must all be true."""
    if not isinstance(predicate, And):
        return [predicate]
    return [conjunct for operand in predicate.operands for conjunct in conjuncts(operand)]
