"""The base of the configs of add-ons, merge rules and reducers."""

from typing import TYPE_CHECKING

from fedssl.protocol.base import StrictModel
from fedssl.protocol.model import ModelConfig

if TYPE_CHECKING:
    from fedssl.protocol.methods.composed import ComposedConfig


class PartConfig(StrictModel):
    """One part of a composed method. Subclasses set `name` to a literal with a default."""

    name: str

    def check(self, host: "ComposedConfig", model: ModelConfig) -> None:
        """Raise ValueError, with the reason, where the part makes no sense in this method or on this model."""
