"""Config of FedCA."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.data import PublicDataConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig


class FedCAConfig(ComposedConfig):
    """Contrast with a dictionary of embeddings of all clients, and alignment to a base model on public images."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedCA",
        paper="Zhang et al. 2020, Federated Unsupervised Representation Learning",
        equations="from memory, as no code is public: FedCA's dictionary and alignment modules",
        leaves_the_client="weights of encoder and projector; a dictionary, each entry the embedding of one of the "
        "client's images",
        stays_on_the_client="nothing between rounds",
    )

    needs_others: ClassVar[bool] = True
    averaged_apart: ClassVar[str | None] = "dictionary"
    objective_not_summed: ClassVar[str | None] = "fedca collects the embeddings of single images from each client"

    name: Literal["fedca"] = "fedca"
    temperature: float = Field(default=0.5, gt=0, le=100, description="tau of the contrast (FedCA: 0.5, from memory).")
    dictionary_size: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description="Embeddings that each client receives (FedCA: 1024, from memory).",
    )
    client_dictionary_size: int = Field(
        default=256,
        ge=1,
        le=1_000_000,
        description="Embeddings that each client sends. If not all of them fit, the first of each client are used.",
    )
    alignment_weight: float = Field(
        default=0.01,
        ge=0,
        le=1000,
        description="beta, weight of the distance to the base model on public images (FedCA: 0.01, from memory). "
        "0 leaves base model and public images out.",
    )
    num_base_epochs: int = Field(
        default=100,
        ge=1,
        le=100_000,
        description="Epochs over the public images for which the coordinator trains the base model, before the first "
        "round. FedCA's number is not known.",
    )

    def distillation_epochs(self, round_number: int) -> int:
        own = self.num_base_epochs if self.alignment_weight and round_number == 0 else 0
        return own + super().distillation_epochs(round_number)

    def check_public_data(self, public_data: PublicDataConfig | None) -> None:
        super().check_public_data(public_data)
        if self.alignment_weight and public_data is None:
            raise ValueError(
                "fedca aligns clients with a base model on public images: add a [public_data] section, "
                "or set method.alignment_weight to 0"
            )
