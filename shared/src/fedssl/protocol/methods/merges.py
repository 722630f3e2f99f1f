"""Configs of the merge rules: what a client does with the global model that it receives."""

from typing import Annotated, Literal

from pydantic import Field

from fedssl.protocol.methods.parts import PartConfig


class OverwriteConfig(PartConfig):
    """The global model replaces the client's."""

    name: Literal["overwrite"] = "overwrite"


AnyMerge = Annotated[OverwriteConfig, Field(discriminator="name")]
