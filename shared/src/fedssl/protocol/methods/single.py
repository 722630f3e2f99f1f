"""Config of training without a federation."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedbyol import FedBYOLConfig
from fedssl.protocol.methods.merges import AnyMerge, LocalConfig
from fedssl.protocol.methods.reducers import AnyReducer, NoReducerConfig


class SingleConfig(FedBYOLConfig):
    """BYOL at every client by itself: nothing is sent, nothing averaged."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="Single-client training",
        paper="The baseline of FedU (Zhuang et al. 2021, Section 4.1: Single Client Training) and of FLESD (Shi et al. "
        "2021: Min-Local)",
        equations="BYOL Eq. 2, symmetrised",
        leaves_the_client="nothing: the update holds no tensor. Loss and number of images are reported as always",
        stays_on_the_client="all of its networks",
    )

    name: Literal["single"] = "single"  # type: ignore[assignment]
    merge: AnyMerge = Field(
        default=LocalConfig(), description="Keep the own weights; together with the reducer, for any other method too."
    )
    reducer: AnyReducer = Field(default=NoReducerConfig(), description="Combine nothing.")
