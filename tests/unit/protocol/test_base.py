"""The base of all wire models."""

import signal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from fedssl.protocol.base import RegisteredName, StrictModel
from fedssl.protocol.validation import first_problem


def test_ctrl_c_while_a_model_is_written_stays_an_interruption() -> None:
    """Otherwise `fedssl compare` counts the run as failed and continues with the next one."""
    presses = iter([True])

    def press(_: int) -> bool:
        if next(presses, False):
            signal.raise_signal(signal.SIGINT)
        return False

    class Pressed(StrictModel):
        number: int = Field(default=7, exclude_if=press)

    with pytest.raises(KeyboardInterrupt):
        Pressed().model_dump_json()
    assert Pressed().model_dump_json() == '{"number":7}'


def test_a_name_that_is_refused_may_be_that_of_weights() -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(RegisteredName).validate_python("Weights of 2025")
    assert first_problem(refused.value).message.startswith("a registered name has lower-case letters and digits")
