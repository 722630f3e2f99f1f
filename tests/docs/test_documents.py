"""The documents are true: specs validate, commands exist, and links have targets."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from fedssl.cli.main import app as fedssl_app
from fedssl.protocol.runs import RunSpec
from fedssl_coordinator.main import app as coordinator_app
from fedssl_worker.main import app as worker_app
from support.documents import DOCUMENTS, ROOT

PAGES = [path for path in DOCUMENTS if path.parent != ROOT]
PROGRAMS = {"fedssl": fedssl_app, "fedssl-coordinator": coordinator_app, "fedssl-worker": worker_app}

_FENCE = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`((?:fedssl|fedssl-worker|fedssl-coordinator) [a-z][^`]*)`")
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def _blocks(language: str) -> list[tuple[str, str]]:
    return [
        (path.name, text) for path in DOCUMENTS for kind, text in _FENCE.findall(path.read_text()) if kind == language
    ]


def _commands() -> list[tuple[str, list[str]]]:
    lines = [
        (name, line.strip())
        for language, prompt in (("console", "$ "), ("bash", "fedssl"), ("sh", "fedssl"))
        for name, text in _blocks(language)
        for line in text.splitlines()
        if line.strip().startswith(prompt)
    ]
    return [(name, shlex.split(line.removeprefix("$ ").partition(" | ")[0], comments=True)) for name, line in lines]


def _mentions() -> list[tuple[str, str]]:
    return [
        (path.name, " ".join(command.split()))
        for path in DOCUMENTS
        if path.name not in {"CHANGELOG.md", "log.md"}  # these also mention names that have changed since
        for command in _INLINE.findall(path.read_text())
    ]


@pytest.mark.parametrize(("document", "text"), _blocks("toml"))
def test_every_toml_block_is_a_valid_spec(document: str, text: str) -> None:
    RunSpec.model_validate(tomllib.loads(text))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_spec(path: Path) -> None:
    RunSpec.model_validate(tomllib.loads(path.read_text()))


def test_the_documents_contain_commands() -> None:
    assert len(_commands()) >= 10


@pytest.mark.parametrize(
    ("document", "words"), _commands(), ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60]
)
def test_every_command_exists_with_its_options(document: str, words: list[str]) -> None:
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[0] in PROGRAMS:
        _check(typer.main.get_command(PROGRAMS[words[0]]), words[1:])


@pytest.mark.parametrize(("document", "command"), sorted(set(_mentions())))
def test_every_mentioned_command_exists_with_its_options(document: str, command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    _check(typer.main.get_command(PROGRAMS[program]), words)


def _check(command: Any, words: list[str]) -> None:
    if words[:1] == ["--connection"]:
        words = words[2:]
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"{words[0]} is no command of {command.name}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if word.startswith("-") and word.split("=")[0] not in {*known, "--help"}]
    assert unknown == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(path: Path) -> None:
    missing = [target for target in _LINK.findall(path.read_text()) if not (path.parent / target).exists()]
    assert missing == []


def test_the_index_links_to_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in _LINK.findall(index.read_text())}
    assert [page for page in PAGES if page != index and not linked & {page, *page.parents}] == []
