"""Configs of the merge rules: what a client does with the global model that it receives."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.parts import Host, PartConfig
from fedssl.protocol.model import ModelConfig


def _check_convolutions(setting: str, model: ModelConfig) -> None:
    """Raise ValueError if the distance of EasyFL's code, a mean over trained convolutions, is undefined."""
    if not model.encoder.is_convolutional:
        raise ValueError(
            f"method.merge.{setting} reference is a mean over an encoder's convolutions, and {model.encoder.name} does "
            f"not declare any: set method.merge.{setting} to paper, which takes all weights"
        )
    if model.trainable is not None:
        raise ValueError(
            f"method.merge.{setting} reference is a mean over an encoder's convolutions, and model.trainable freezes "
            f"some of them: set method.merge.{setting} to paper, which takes all weights"
        )


class DAPUConfig(PartConfig):
    """FedU: the encoder is overwritten, the predictor only if the client drifted little (FedU Eq. 3)."""

    why_not_own_norms: ClassVar[str | None] = "method.merge dapu takes or keeps a whole predictor, BatchNorm included"

    name: Literal["dapu"] = "dapu"
    mu: float = Field(
        default=0.4,
        ge=0,
        le=1e9,
        description="Threshold of the divergence: FedU takes 0.4 for CIFAR-10, 0.6 for CIFAR-100 and finds 0.2 best "
        "with one local epoch per round.",
    )
    distance: Literal["reference", "paper"] = Field(
        default="reference",
        description="Divergence of the last local training. `reference` is EasyFL's mean over convolutions of an L2 "
        "norm, for which the thresholds were chosen; `paper` is Eq. 3's squared L2 norm over encoder and projector.",
    )
    predictor: Literal["dapu", "global", "local"] = Field(
        default="dapu", description="Table 4: by the divergence; always the global predictor; always the client's own."
    )
    aggregate: Literal["online", "target"] = Field(
        default="online", description="Table 4: which of a client's encoders is sent and averaged."
    )
    update: Literal["online", "target", "both"] = Field(
        default="online", description="Table 4: which of a client's encoders the global one replaces."
    )

    def check(self, host: Host, model: ModelConfig) -> None:
        if "predictor" not in host.traits:
            raise ValueError(
                f"dapu decides about a predictor, and {host.name} does not have one: set method.merge to overwrite"
            )
        if self.distance == "reference":
            _check_convolutions("distance", model)
        if "target" not in host.traits and (self.aggregate, self.update) != ("online", "online"):
            raise ValueError(
                f"{host.name} has no target network: method.merge.aggregate and method.merge.update must be online"
            )


class DivergenceAwareConfig(PartConfig):
    """The client's network is mixed into the global one, depending on how far they are apart."""

    why_not_own_norms: ClassVar[str | None] = (
        "the merge rule measures how far a client's network is from the global one, which would have no BatchNorm that "
        "was trained"
    )

    tau: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description="Share of the client's own network in its first mixed round (FedEMA and FedRLC: 0.7).",
    )
    variant: Literal["paper", "reference"] = Field(
        default="paper",
        description="Divergence: `paper` is that from the client's network to the received one (FedRLC's formula); "
        "`reference` is that of the client's last local training (EasyFL).",
    )
    cap: float = Field(
        default=1.0, gt=0, le=1, description="Largest share of the client's own network (FedU2's code: 0.7)."
    )
    selective: bool = Field(
        default=True,
        description="A client that missed the previous round takes the global network, also as its target network or "
        "DINO's teacher.",
    )

    def check(self, host: Host, model: ModelConfig) -> None:
        if self.variant == "reference":
            _check_convolutions("variant", model)


class CenterMergeConfig(DivergenceAwareConfig):
    """FedRLC: FedEMA's rule for the network, and a mix by their divergence for the cluster centers (Eq. 10 to 12)."""

    name: Literal["centers"] = "centers"
    centers: Literal["divergence", "global"] = Field(
        default="divergence",
        description="The client's centers: the global ones mixed with its own by their divergence (Eq. 10), or the "
        "global ones.",
    )

    def check(self, host: Host, model: ModelConfig) -> None:
        super().check(host, model)
        if all(add_on.name != "crossed_kl" for add_on in host.add_ons):
            raise ValueError(
                "method.merge centers mixes the centers of crossed_kl: add crossed_kl to method.add_ons, or use ema"
            )


class EMAConfig(DivergenceAwareConfig):
    """FedEMA: the client's network moves towards the global one, and less so the further apart they are."""

    name: Literal["ema"] = "ema"


class OverwriteConfig(PartConfig):
    """The global model replaces the client's."""

    name: Literal["overwrite"] = "overwrite"


class LocalConfig(PartConfig):
    """Each client keeps its own weights and sends nothing: training without a federation."""

    sends_nothing: ClassVar[bool] = True

    name: Literal["local"] = "local"

    def check(self, host: Host, model: ModelConfig) -> None:
        if host.reducer.name != "none":
            raise ValueError("method.merge local sends nothing, so nothing can be combined: set method.reducer to none")
        if host.needs_others:
            raise ValueError(f"{host.name} learns from what the other clients send: method.merge local sends nothing")
        if wanting := [add_on.name for add_on in host.add_ons if add_on.needs_others]:
            raise ValueError(
                f"the add-on {wanting[0]} needs the global model, and with method.merge local there is none: "
                "remove one of the two"
            )


AnyMerge = Annotated[
    CenterMergeConfig | DAPUConfig | EMAConfig | LocalConfig | OverwriteConfig, Field(discriminator="name")
]
