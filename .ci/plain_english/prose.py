"""Find the prose in a source file: documents, comments, docstrings and messages, without code and identifiers."""

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import NamedTuple

MIN_WORDS = 3
"""A string literal with fewer words is a name, not a message."""

SKIPPED = ("*/vendor/*", "*docs/log.md", "*docs/contributing/log.md", "openapi.json", ".ci/plain_english/*")
"""Not ours, the experiments' log, generated from the sources, or this program's own examples."""

_STRING = (
    r"""[rRbBuUfF]{0,2}(?:\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
)
_PYTHON = re.compile(rf"#[^\n]*|{_STRING}(?:\s+{_STRING})*", re.DOTALL)
_QUOTED = r'"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'"
_HASH = re.compile(rf"(?:(?<=\s)|^)#[^\n]*|{_QUOTED}", re.MULTILINE)
_YAML = re.compile(rf"{_HASH.pattern}|(?<=[:-] )[^\s\"'#{{\[|>&*][^\n#]*", re.MULTILINE)
_SCRIPT = re.compile(rf"/\*.*?\*/|(?<![:\w])//[^\n]*|{_QUOTED}|`(?:[^`\\]|\\.)*`", re.DOTALL)
_TEMPLATE = re.compile(r"\{#.*?#\}|\{\{/?-?.*?\}\}|\{%.*?%\}|<[^>]*>|[^<{]+|[<{]", re.DOTALL)
_FENCE = re.compile(r"^ *```.*?^ *```[^\n]*$", re.DOTALL | re.MULTILINE)
_HIDDEN = re.compile(r"`[^`\n]*`|(?<=\])\([^)\s]*\)|https?://\S+|\$?\{(?:[^{}]|\{[^{}]*\})*\}|<[a-z/][^>]*>")
_WORD = re.compile(r"[^\W\d_]{2,}")


class Span(NamedTuple):
    start: int
    end: int


class Prose(NamedTuple):
    """The prose of a file: its pieces in `text`, a space between neighbours and NUL for the code between others."""

    text: str
    starts: list[int]
    """Where each piece starts in `text`."""
    spans: list[Span]
    """Where each piece is in the file. A piece is as long as its span."""

    def locate(self, position: int) -> int:
        """Return the position in the file of a position in `text`."""
        index = bisect_right(self.starts, position) - 1
        return self.spans[index].start + position - self.starts[index]


def read_prose(path: str, source: str) -> Prose | None:
    """Return the prose of the file at `path` (relative to the repository), or None if this kind of file has none."""
    spans = None if any(fnmatch(path, pattern) for pattern in SKIPPED) else _spans(path, source)
    if spans is None:
        return None
    pieces: list[str] = []
    starts: list[int] = []
    length = end = 0
    ordered = sorted(spans)
    for span in ordered:
        pieces += [" " if source[end : span.start].isspace() else "\0", _clean(source[span.start : span.end])]
        starts.append(length + 1)
        length, end = length + 1 + span.end - span.start, span.end
    return Prose("".join(pieces), starts, ordered)


def _clean(text: str) -> str:
    """Hide code, links and placeholders, and turn the marks between two lines of prose into spaces."""
    if text.startswith("test_"):
        return text.replace("_", " ")
    text = _HIDDEN.sub(lambda match: re.sub(r"\S", "_", match[0]), text)
    text = re.sub(r"\\n|\"\s+[rbuf]?\"", lambda match: re.sub(r"\S", " ", match[0]), text)
    return re.sub(r"^(\s*)(#+|//|\*|>)", lambda match: match[1] + " " * len(match[2]), text, flags=re.MULTILINE)


def _spans(path: str, source: str) -> Iterator[Span] | None:
    if path.endswith(".py"):
        return _python(path, source)
    if path.endswith(".md"):
        return _markdown(source)
    if path.endswith((".html", ".tpl", "NOTES.txt")):
        return _template(source)
    if path.endswith((".js", ".mjs", ".css")):
        return _scan(_SCRIPT, source)
    if path.endswith((".yaml", ".yml")):
        return _scan(_YAML, source)
    if path.endswith((".json", ".ipynb", ".toml", ".sh", "Dockerfile", "Caddyfile")):
        return _scan(_HASH, source)
    if path.endswith("Makefile"):
        return (Span(m.start(), m.end()) for m in _HASH.finditer(source))
    return None


def _is_message(literal: str) -> bool:
    return len(_WORD.findall(_HIDDEN.sub("_", literal))) >= MIN_WORDS and " " in literal


def _scan(pattern: re.Pattern[str], source: str) -> Iterator[Span]:
    for match in pattern.finditer(source):
        if match[0][0] in "\"'`" and _is_message(match[0][1:-1]):
            yield Span(match.start() + 1, match.end() - 1)
        elif match[0][0] in "#/" or _is_message(match[0]):
            yield Span(match.start(), match.end())


def _markdown(source: str) -> Iterator[Span]:
    end = 0
    for fence in _FENCE.finditer(source):
        yield Span(end, fence.start())
        for comment in re.finditer(r"(?:(?<=\s\s)|^)# [^\n]*", fence[0], re.MULTILINE):
            yield Span(fence.start() + comment.start(), fence.start() + comment.end())
        end = fence.end()
    yield Span(end, len(source))


def _template(source: str) -> Iterator[Span]:
    for match in _TEMPLATE.finditer(source):
        if match[0].startswith(("{#", "{{/*", "{{- /*")):
            yield Span(match.start() + 2, match.end() - 2)
        elif match[0][0] in "<{":
            for quoted in re.finditer(_QUOTED, match[0]):
                if _is_message(quoted[0]) and "{" not in quoted[0]:
                    yield Span(match.start() + quoted.start() + 1, match.start() + quoted.end() - 1)
        else:
            yield Span(match.start(), match.end())


def _python(path: str, source: str) -> Iterator[Span]:
    is_test = path.startswith("tests/")
    docstrings, names = _declarations(source)
    starts = [0, *(match.end() for match in re.finditer("\n", source))]
    for line, name in names:
        start = source.index(name, starts[line - 1])
        yield Span(start, start + len(name))
    for match in _PYTHON.finditer(source):
        line = bisect_right(starts, match.start())
        if match[0][0] == "#" or (line in docstrings and not source[starts[line - 1] : match.start()].strip()):
            yield Span(match.start(), match.end())
        elif not is_test and _is_message(match[0]):
            yield Span(match.start() + 1, match.end() - 1)


def _declarations(source: str) -> tuple[set[int], list[tuple[int, str]]]:
    """Return the lines of the docstrings, and the line and name of each test function."""
    docstrings, names = set(), []
    blocks: list[ast.AST] = [ast.parse(source)]
    while blocks:
        block = blocks.pop()
        for statement in getattr(block, "body", []):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(statement.lineno)
            elif hasattr(statement, "body"):
                blocks.append(statement)
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef) and block.name.startswith("test_"):
            names.append((block.lineno, block.name))
    return docstrings, names
