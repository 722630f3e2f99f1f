"""Tests of `.ci/plain_english`: which text it reads, which of it is users' text, what it finds, and when it fails."""

import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

COMMAND = Path(__file__).parents[2] / ".ci/plain_english"
PROGRAM = runpy.run_path(str(COMMAND), run_name="plain_english")
RULES = PROGRAM["Rules"].read()
WORDS = {word.name: word for word in RULES.words}
ENTRIES = tomllib.loads((COMMAND / "words.toml").read_text())["words"]


def _hits(path: str, source: str) -> list[tuple[int, str, str]]:
    return sorted((hit.line, hit.audience, hit.word.name) for hit in RULES.find(path, source))


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


def test_python_messages_are_users_text_and_identifiers_are_not_read() -> None:
    assert _hits("shared/src/fedssl/engine/steps.py", PYTHON) == [
        (1, "internal", "anew"),
        (2, "internal", "go on"),
        (4, "internal", "whoever"),
        (8, "internal", "anew"),
        (10, "users", "anew"),
    ]


@pytest.mark.parametrize(
    "path",
    [
        "shared/src/fedssl/cli/run/submit.py",
        "services/coordinator/src/fedssl_coordinator/federation/runs/endpoints.py",
        "services/worker/src/fedssl_worker/main.py",
    ],
)
def test_docstrings_of_commands_and_endpoints_are_users_text(path: str) -> None:
    source = '"""Anew."""\n\ndef start():\n    """Start anew."""\n\ndef _start():\n    """Start anew."""\n'
    assert _hits(path, source) == [(1, "internal", "anew"), (4, "users", "anew"), (7, "internal", "anew")]


def test_docstrings_of_the_protocol_are_users_text() -> None:
    source = 'class View(Model):\n    """What is told of a run."""\n'
    path = "shared/src/fedssl/protocol/views.py"
    assert _hits(path, source) == [(2, "users", "What ... (docstring)"), (2, "users", "tell, told")]


def test_strings_of_tests_are_not_read_but_their_names_are() -> None:
    source = 'def test_a_run_goes_on():\n    assert "the run goes on here"\n'
    assert _hits("tests/unit/test_runs.py", source) == [(1, "internal", "go on")]


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
    expected = [(1, "users", "anew"), (3, "users", "go on"), (7, "users", "anew"), (11, "users", "whoever")]
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
            [(1, "internal", "anew"), (2, "users", "anew"), (2, "users", "go on")],
        ),
        (
            "dashboard/static/run.js",
            "// drawn anew\nconst anew = 'anew', text = `goes on for ${anew} rounds`;\n",
            [(1, "internal", "anew"), (2, "users", "go on")],
        ),
        (
            "helm/fedssl/templates/_validate.tpl",
            '{{/* anew */}}\n{{- fail "this is no value of the chart" }}\n',
            [(1, "internal", "anew"), (2, "users", "is no")],
        ),
        ("helm/fedssl/values.yaml", "a: 1  # is no limit\n", [(1, "users", "is no")]),
        ("helm/fedssl/values.schema.json", '{"description": "It is no\\nlimit."}', [(1, "users", "is no")]),
        ("tables/x.yaml", "# told\na: a file beside others\n", [(1, "internal", "tell, told"), (2, "users", "beside")]),
        ("Makefile", "# told\ntest: ## Begin anew\n", [(1, "internal", "tell, told"), (2, "users", "anew")]),
    ],
)  # fmt: skip
def test_words_are_found_in_other_kinds_of_files(path: str, source: str, expected: list[tuple[int, str, str]]) -> None:
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


def test_the_list_gives_place_phrase_and_advice(tmp_path: Path) -> None:
    _repository(tmp_path, good="It begins again.\n", bad="Fine.\n\nIt begins anew.\n")
    done = _run(tmp_path, "--list")
    assert done.returncode == 1
    assert done.stdout.startswith('bad.md:3: [users] anew: "Fine. It begins [anew].": write "again"')
    assert done.stdout.endswith("\n1 hits\n")
    assert _run(tmp_path, "--list", "good.md").returncode == 0


def test_paths_are_accepted_only_with_list_or_counts(tmp_path: Path) -> None:
    _repository(tmp_path, good="It begins again.\n")
    assert _run(tmp_path, "good.md").returncode == 2


def test_counts_prints_a_table_of_all_words(tmp_path: Path) -> None:
    _repository(tmp_path, bad="It begins anew, and goes on.\n")
    lines = _run(tmp_path, "--counts").stdout.splitlines()
    assert len(lines) == 1 + len(WORDS) + 1
    assert lines[1].split() == ["anew", "1", "0"]
    assert lines[-1].split() == ["total", "2", "0"]


def _counts(**users: int) -> dict[str, dict[str, int]]:
    return {"users": users, "internal": {}}


def test_a_word_that_occurs_more_often_than_recorded_fails(capsys: pytest.CaptureFixture[str]) -> None:
    hits: list[Any] = list(RULES.find("docs/runs.md", "It begins anew.\n"))
    check = PROGRAM["check"]
    assert check(hits, _counts(anew=1), _counts(anew=0)) == 1
    printed = capsys.readouterr().out
    assert "docs/runs.md:1" in printed
    assert "anew: 1 times in users text, and at most 0 are allowed" in printed
    assert check(hits, _counts(anew=1), _counts()) == 1
    assert check(hits, _counts(anew=1), _counts(anew=1)) == 0


def test_fewer_words_than_recorded_ask_for_a_lower_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAM["check"]([], _counts(anew=1), _counts(anew=1)) == 0
    assert capsys.readouterr().out == ""
    assert PROGRAM["check"]([], _counts(anew=1), _counts(anew=2)) == 0
    assert "--write" in capsys.readouterr().out


def test_recorded_counts_are_only_ever_lowered() -> None:
    old, new = _counts(anew=2, told=2), _counts(anew=1, told=3, beside=4)
    assert PROGRAM["lowered"](old, new) == _counts(anew=1, told=2, beside=4)


def test_every_word_has_a_recorded_count() -> None:
    recorded = json.loads((COMMAND / "counts.json").read_text())
    assert {kind: set(words) for kind, words in recorded.items()} == {"users": set(WORDS), "internal": set(WORDS)}
