"""Configs of the merge rules: what a client does with the global model that it receives."""

from typing import Annotated, Literal

from pydantic import Field

from fedssl.protocol.methods.parts import Host, PartConfig
from fedssl.protocol.model import ModelConfig


class DAPUConfig(PartConfig):
    """FedU: the encoder is overwritten, the predictor only where the client drifted little (FedU Eq. 3)."""

    name: Literal["dapu"] = "dapu"
    mu: float = Field(
        default=0.4,
        ge=0,
        le=1e9,
        description="Threshold of the divergence: FedU takes 0.4 for CIFAR-10, 0.6 for CIFAR-100 and finds 0.2 best "
        "with one local epoch a round.",
    )
    distance: Literal["reference", "paper"] = Field(
        default="reference",
        description="Divergence of the last local training. `reference` is EasyFL's mean over convolutions of an L2 "
        "norm, which the thresholds are for; `paper` is Eq. 3's squared L2 norm over encoder and projector.",
    )
    predictor: Literal["dapu", "global", "local"] = Field(
        default="dapu", description="Table 4: by the divergence; always the global predictor; always the client's own."
    )
    aggregate: Literal["online", "target"] = Field(
        default="online", description="Table 4: which of a client's encoders goes up and is averaged."
    )
    update: Literal["online", "target", "both"] = Field(
        default="online", description="Table 4: which of a client's encoders the global one replaces."
    )

    def check(self, host: Host, model: ModelConfig) -> None:
        if "predictor" not in host.traits:
            raise ValueError(f"dapu decides about a predictor, and {host.name} has none: take method.merge overwrite")
        if "target" not in host.traits and (self.aggregate, self.update) != ("online", "online"):
            raise ValueError(
                f"{host.name} has no target network: method.merge.aggregate and method.merge.update must be online"
            )


class DivergenceAwareConfig(PartConfig):
    """The client's network is mixed into the global one, by how far they are apart."""

    tau: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description="Share of the client's own network in its first mixed round (FedEMA and FedRLC: 0.7).",
    )
    variant: Literal["paper", "reference"] = Field(
        default="paper",
        description="Divergence: `paper` from the client's network to the one received (FedRLC's formula); `reference` "
        "of the client's last local training (EasyFL).",
    )
    cap: float = Field(default=1.0, gt=0, le=1, description="Largest share of the client's own (FedU2's code: 0.7).")
    selective: bool = Field(
        default=True,
        description="A client that missed the round before takes the global network, as its target network too.",
    )


class CenterMergeConfig(DivergenceAwareConfig):
    """FedRLC: FedEMA's rule for the network, and a mix by their divergence for the cluster centers (Eq. 10 to 12)."""

    name: Literal["centers"] = "centers"
    centers: Literal["divergence", "global"] = Field(
        default="divergence",
        description="The client's centers: mixed with its own by their divergence (Eq. 10), or the global ones.",
    )

    def check(self, host: Host, model: ModelConfig) -> None:
        if all(add_on.name != "crossed_kl" for add_on in host.add_ons):
            raise ValueError(
                "method.merge centers mixes the centers of crossed_kl: add that to method.add_ons, or take ema"
            )


class EMAConfig(DivergenceAwareConfig):
    """FedEMA: the client's network moves towards the global one, the less the further apart they are."""

    name: Literal["ema"] = "ema"


class OverwriteConfig(PartConfig):
    """The global model replaces the client's."""

    name: Literal["overwrite"] = "overwrite"


class LocalConfig(PartConfig):
    """Every client keeps its own weights and sends nothing: training without a federation."""

    name: Literal["local"] = "local"

    def check(self, host: Host, model: ModelConfig) -> None:
        if host.reducer.name != "none":
            raise ValueError("method.merge local sends nothing, so nothing can be combined: set method.reducer to none")
        if host.needs_others:
            raise ValueError(f"{host.name} learns from what the other clients send: method.merge local sends nothing")
        if wanting := [add_on.name for add_on in host.add_ons if add_on.needs_others]:
            raise ValueError(
                f"the add-on {wanting[0]} needs the global model, and with method.merge local there is none: "
                "leave one of the two out"
            )


AnyMerge = Annotated[
    CenterMergeConfig | DAPUConfig | EMAConfig | LocalConfig | OverwriteConfig, Field(discriminator="name")
]
