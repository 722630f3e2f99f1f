"""The base of the configs of add-ons, merge rules and reducers."""

from typing import ClassVar, Literal, Protocol

from pydantic import Field

from fedssl.protocol.base import StrictModel
from fedssl.protocol.data import PublicDataConfig
from fedssl.protocol.model import ModelConfig
from fedssl.protocol.training import CohortConfig, TrainingConfig

Trait = Literal["views", "projector", "symmetric", "dimensions", "predictor", "target", "prototypes", "labels"]
"""The properties of an objective that a part may need: two views of an image; a projector; a loss that compares the
online network's embeddings only with one another; a loss that needs every dimension to vary over the batch; a
predictor; a target network that stays with the client; prototypes that are trained and sent; labels."""


class Host(Protocol):
    """The attributes that a part may read of the method that it belongs to."""

    @property
    def name(self) -> str: ...

    @property
    def traits(self) -> frozenset[Trait]: ...

    @property
    def needs_others(self) -> bool: ...

    @property
    def averaged_apart(self) -> str | None: ...

    @property
    def add_ons(self) -> "tuple[PartConfig, ...]": ...

    @property
    def merge(self) -> "PartConfig": ...

    @property
    def reducer(self) -> "PartConfig": ...

    def embedding_width(self, model: ModelConfig) -> int:
        """Return D, the width of what the losses compare."""
        ...


class PartConfig(StrictModel):
    """One part of a composed method. Subclasses set `name` to a literal with a default."""

    needs_others: ClassVar[bool] = False
    """True if the part uses what other clients learnt, and so cannot be used if nothing is sent."""

    sends: ClassVar[bool] = False
    """True if the part sends tensors of its own: a head, centers, control variates."""

    averaged_apart: ClassVar[str | None] = None
    """The tensors of this part that are averaged whatever the reducer is, in words, or None."""

    restarts_states: ClassVar[bool] = False
    """True if every client must start cold after one of them has lost its state, because their states belong
    together."""

    why_not_summed: ClassVar[str | None] = None
    """Why the coordinator cannot compute this part's result from a weighted sum over the clients, or None if it can, or
    if the part sends nothing."""

    sends_nothing: ClassVar[bool] = False
    """True if no client sends a tensor with this part."""

    why_not_own_norms: ClassVar[str | None] = None
    """Why no client can keep a BatchNorm of its own (`model.batch_norm = "local"`) with this part; None if it can."""

    name: str

    def check(self, host: Host, model: ModelConfig) -> None:
        """Raise ValueError, with the reason, if the part does not fit this method or this model."""

    def check_training(self, training: TrainingConfig) -> None:
        """Raise ValueError, with the reason, if the part does not fit this training."""

    def check_public_data(self, public_data: PublicDataConfig | None) -> None:
        """Raise ValueError, with the reason, if the part lacks public images or these do not fit."""

    def check_cohort(self, cohort: CohortConfig) -> None:
        """Raise ValueError, with the reason, if the part does not fit this cohort."""

    def distillation_epochs(self, round_number: int) -> int:
        """Return `MethodConfig.distillation_epochs` of only this part."""
        return 0


class DimensionedConfig(PartConfig):
    """A part that assigns each client its own dimensions of the embedding."""

    num_clients: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Divide the embedding's D dimensions among this many clients, floor(D / num_clients) each. If "
        "None, among the clients that the run starts with. More leave dimensions for clients that join later.",
    )

    def check(self, host: Host, model: ModelConfig) -> None:
        width = host.embedding_width(model)
        if self.num_clients is not None and width < self.num_clients:
            raise ValueError(
                f"{self.name} cannot divide an embedding of {width} dimensions among {self.num_clients} clients: "
                "widen model.projector.out_dim"
            )
