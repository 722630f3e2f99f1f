"""Every method that this build can train, by name."""

from fedssl.methods.composition.method import BoundMethod, Method
from fedssl.methods.registry import METHODS

__all__ = ["METHODS", "BoundMethod", "Method"]
