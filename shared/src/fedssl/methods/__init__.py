"""Every method that this build can train, by name."""

from typing import Any

from fedssl.methods.api import Method
from fedssl.methods.fedalignuniform import FEDALIGNUNIFORM
from fedssl.methods.fedbyol import FEDBYOL
from fedssl.methods.fedsimclr import FEDSIMCLR
from fedssl.methods.supervised import SUPERVISED

METHODS: dict[str, Method[Any]] = {method.name: method for method in (FEDALIGNUNIFORM, FEDBYOL, FEDSIMCLR, SUPERVISED)}

__all__ = ["METHODS", "Method"]
