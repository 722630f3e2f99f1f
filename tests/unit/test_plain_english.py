"""Tests of `.ci/plain_english`: which text it reads, what it finds, and when it fails."""

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

COMMAND = Path(__file__).parents[2] / ".ci/plain_english"
PROGRAM = runpy.run_path(str(COMMAND), run_name="plain_english")
RULES = PROGRAM["Rules"].read()
WORDS = {word.name: word for word in RULES.words}
ENTRIES = tomllib.loads((COMMAND / "words.toml").read_text())["words"]


def _hits(path: str, source: str) -> list[tuple[int, str]]:
    return sorted((hit.line, hit.word.name) for hit in RULES.find(path, source))


@pytest.mark.parametrize("name", ENTRIES)
def test_examples_are_found_and_fine_sentences_are_not(name: str) -> None:
    entry = ENTRIES[name]
    assert entry["examples"]
    for example in entry["examples"]:
        assert list(WORDS[name].find(example)), example
    for sentence in entry["fine"]:
        assert not list(WORDS[name].find(sentence)), sentence


PYTHON = '''"""Begins anew."""
# It goes
# on from there.
LIMIT = "anew"  # too short for a message; whoever reads this


def anew(told: str) -> str:
    """Start anew."""
    raise ValueError(f"{told} cannot be read: begin "
                     "anew with a new file")
'''


def test_docstrings_comments_and_messages_are_read_and_identifiers_are_not() -> None:
    assert _hits("shared/src/fedssl/engine/steps.py", PYTHON) == [
        (1, "anew"),
        (2, "go on"),
        (4, "whoever"),
        (8, "anew"),
        (10, "anew"),
    ]


def test_strings_of_tests_are_not_read_but_their_names_are() -> None:
    source = 'def test_a_run_goes_on():\n    assert "the run goes on here"\n'
    assert _hits("tests/unit/test_runs.py", source) == [(1, "go on")]


def test_code_and_output_in_documents_are_not_read() -> None:
    source = """# Anew

It goes
on with `fedssl anew` and [a page](anew.md).

```console
$ fedssl run start   # begins anew
the run goes on
```

Whoever reads this.
"""
    expected = [(1, "anew"), (3, "go on"), (7, "anew"), (11, "whoever")]
    assert _hits("docs/runs.md", source) == expected


def test_the_experiment_log_and_third_party_files_are_not_read() -> None:
    for path in ("docs/log.md", "docs/contributing/log.md", "dashboard/static/vendor/htmx.min.js", "openapi.json"):
        assert _hits(path, '"begins anew, whoever asks"') == []


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        (
            "dashboard/templates/run.html",
            '{# drawn anew #}\n<a title="drawn anew each time" class="anew">{{ anew }} goes on</a>\n',
            [(1, "anew"), (2, "anew"), (2, "go on")],
        ),
        (
            "dashboard/static/run.js",
            "// drawn anew\nconst anew = 'anew', text = `goes on for ${anew} rounds`;\n",
            [(1, "anew"), (2, "go on")],
        ),
        (
            "helm/fedssl/templates/_validate.tpl",
            '{{/* anew */}}\n{{- fail "this is no value of the chart" }}\n',
            [(1, "anew"), (2, "is no")],
        ),
        ("helm/fedssl/values.yaml", "a: 1  # is no limit\n", [(1, "is no")]),
        ("helm/fedssl/values.schema.json", '{"description": "It is no\\nlimit."}', [(1, "is no")]),
        ("tables/x.yaml", "# told\na: a file beside others\n", [(1, "tell, told"), (2, "beside")]),
        ("Makefile", "# told\ntest: ## Begin anew\n", [(1, "tell, told"), (2, "anew")]),
    ],
)  # fmt: skip
def test_words_are_found_in_other_kinds_of_files(path: str, source: str, expected: list[tuple[int, str]]) -> None:
    assert _hits(path, source) == expected


def test_an_allowed_phrase_is_allowed_only_in_its_file() -> None:
    allowed = RULES._replace(allowed=[("docs/*.md", PROGRAM["_pattern"]("the chapter Begin anew"))])
    source = "See the chapter *Begin anew*.\nSee the chapter Begin\nanew. It begins anew.\n"
    assert [hit.line for hit in allowed.find("docs/paper.md", source)] == [1, 3]
    assert len(list(allowed.find("README.md", source))) == 3


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMMAND), "--root", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _repository(folder: Path, **files: str) -> None:
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    for name, text in files.items():
        (folder / f"{name}.md").write_text(text)


def test_each_finding_has_its_place_phrase_and_advice(tmp_path: Path) -> None:
    _repository(tmp_path, good="It begins again.\n", bad="Fine.\n\nIt begins anew.\n")
    done = _run(tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith('bad.md:3: anew: "Fine. It begins [anew].": write "again"')
    assert done.stdout.count("\n") == 1
    good = _run(tmp_path, "good.md")
    assert (good.returncode, good.stdout) == (0, "")
