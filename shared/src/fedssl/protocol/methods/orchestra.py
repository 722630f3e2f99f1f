"""Config of Orchestra."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait
from fedssl.protocol.methods.reducers import AnyReducer, MeanConfig
from fedssl.protocol.model import ModelConfig
from fedssl.protocol.plan import SENT_APART, Kind
from fedssl.protocol.training import TrainingConfig


class OrchestraConfig(ComposedConfig):
    """Views of an image belong to the same cluster of all clients' images, found from centroids that clients send."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="Orchestra",
        paper="Lubana et al. 2022, Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering",
        equations="the clustering and rotation losses, local and global clustering as in Orchestra's code",
        leaves_the_client="weights of encoder, projector and rotation head, of the target network too unless it is "
        "kept; local centroids, each the mean of some of the client's last embeddings",
        stays_on_the_client="the memory of embeddings; the target network if `target` is kept",
    )

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector"})
    needs_others: ClassVar[bool] = True
    averaged_apart: ClassVar[str | None] = "centroids"
    objective_sends_apart: ClassVar[tuple[Kind, ...]] = SENT_APART

    name: Literal["orchestra"] = "orchestra"
    temperature: float = Field(
        default=0.1,
        gt=0,
        le=100,
        description="Temperature of the assignments, on clients and coordinator (Orchestra: 0.1).",
    )
    target_momentum: float = Field(
        default=0.996,
        ge=0,
        le=1,
        description="m of target = m target + (1 - m) online, before every step's forward pass.",
    )
    target: Literal["shared", "kept"] = Field(
        default="shared",
        description="The target network: sent and averaged like the online one, as Orchestra's code does by default, "
        "or kept by its client, as its stateful clients do.",
    )
    num_global_centroids: int = Field(
        default=128, ge=2, le=65_536, description="Clusters of all clients' images together (Orchestra: 128)."
    )
    num_local_centroids: int = Field(
        default=16, ge=1, le=65_536, description="Centroids that each client sends (Orchestra: 16)."
    )
    memory_size: int = Field(
        default=128,
        ge=2,
        le=65_536,
        description="Number of last target embeddings that a client clusters (Orchestra: 128).",
    )
    rotation_weight: float = Field(
        default=1.0, ge=0, le=1000, description="Weight of predicting how far an image is turned; 0 leaves it out."
    )
    clustering_round: bool = Field(
        default=True,
        description="The first round only clusters, so that the second has centroids to train with, as in Orchestra's "
        "code; it counts as a round. If false, the first round trains with random centroids.",
    )
    num_global_steps: int = Field(
        default=500,
        ge=1,
        le=100_000,
        description="Steps of SGD of the coordinator's clustering (Orchestra: 500; FedU2's port: 50).",
    )
    reducer: AnyReducer = Field(
        default=MeanConfig(weighting="batches"),
        description="How the coordinator combines the clients' weights. Orchestra's code weights by batches.",
    )

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if model.projector is None:
            raise ValueError("orchestra clusters the outputs of the projector: describe model.projector")
        if self.num_local_centroids > self.memory_size:
            raise ValueError(
                f"method.num_local_centroids is {self.num_local_centroids}, more than the {self.memory_size} "
                "embeddings that are clustered: raise method.memory_size"
            )

    def check_training(self, training: TrainingConfig) -> None:
        super().check_training(training)
        if training.num_micro_batches > 1 and self.rotation_weight:
            raise ValueError(
                "orchestra turns images by their places in the whole batch: leave training.num_micro_batches out, or "
                "set method.rotation_weight to 0"
            )
