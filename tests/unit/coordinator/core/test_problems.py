"""Problem details are complete, stable, and safe to send and store, even with text from untrusted callers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedssl.client.errors import ServerError, api_error
from fedssl.protocol.errors import Problem
from fedssl_coordinator.core.problems import PREFIX, PROBLEMS, ProblemError, printable


@pytest.mark.parametrize("slug", PROBLEMS)
def test_every_problem_is_complete(slug: str) -> None:
    error = ProblemError(slug, "do something else")
    body = error.body()
    assert (body["type"], body["status"]) == (PREFIX + slug, error.status)
    assert body["title"]
    assert body["detail"] == str(error) == "do something else"
    problem = Problem.model_validate_json(json.dumps(body))
    assert isinstance(api_error(problem), ServerError) == (error.status >= 500)


def test_an_unknown_slug_raises_a_key_error() -> None:
    with pytest.raises(KeyError):
        ProblemError("whatever", "").body()


def test_ordinary_text_is_unchanged() -> None:
    for text in ("", "a b", "größe 数 🙂", "line\nbreak", "x" * 2000):
        assert printable(text) == text


def test_unprintable_text_is_escaped_and_long_text_is_shortened() -> None:
    assert printable("a\x00b") == "a\\x00b"
    assert printable("a\ud800b") == "a\\ud800b"
    assert printable("x" * 2001) == "x" * 2000 + " ..."
    assert printable("x" * 50, 10) == "x" * 10 + " ..."


_any_text = st.text(st.characters(), max_size=50) | st.text(st.characters(categories=["Cs", "Cc"]), max_size=20)


@given(_any_text)
def test_any_text_can_be_sent_and_stored(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert "\x00" not in shown
    assert ProblemError("conflict", text).body()["detail"] == shown
