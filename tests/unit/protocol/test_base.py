"""The base of all wire models."""

import signal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from fedssl.protocol.base import RegisteredName, StrictModel
from fedssl.protocol.validation import first_problem


def test_ctrl_c_during_serialisation_raises_a_keyboard_interrupt() -> None:
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


def test_an_invalid_registered_name_is_reported_without_assuming_its_kind() -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(RegisteredName).validate_python("Weights of 2025")
    assert first_problem(refused.value).message.startswith("a registered name has lower-case letters and digits")
