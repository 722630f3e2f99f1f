"""Configs of the add-ons: loss terms and corrections for any objective for which they are defined."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from fedssl.protocol.methods.parts import DimensionedConfig, Host, PartConfig
from fedssl.protocol.model import MLPConfig, ModelConfig
from fedssl.protocol.training import TrainingConfig


class CrossedKLConfig(PartConfig):
    """FedRLC's crossed divergence: both views are assigned to the same trained cluster centers (Eq. 4 to 8)."""

    sends: ClassVar[bool] = True
    averaged_apart: ClassVar[str | None] = "cluster centers"

    name: Literal["crossed_kl"] = "crossed_kl"
    num_centers: int = Field(
        default=10, ge=2, le=10_000, description="M. FedRLC: the number of classes, 10 for CIFAR-10, 100 for CIFAR-100."
    )
    weight: float = Field(default=1.0, ge=0, le=1000, description="Weight relative to the objective (FedRLC Eq. 9: 1).")
    exponent: float = Field(
        default=-0.5, ge=-100, lt=0, description="Exponent of 1 + ||z - mu||^2: -0.5 as printed in Eq. 4; DEC uses -1."
    )
    scale: Literal["raw", "unit"] = Field(
        default="raw",
        description="`raw` compares embeddings as they are, as in Eq. 4. If that uses few centers, `unit` compares "
        "unit vectors, with centers that start as random unit vectors.",
    )

    def check(self, host: Host, model: ModelConfig) -> None:
        if not {"predictor", "target"} <= host.traits:
            raise ValueError(
                f"crossed_kl compares a predictor's output with a target network's, and {host.name} does not "
                "have both: "
                "use it with fedbyol, fedu or fedema"
            )


class DecorrelationConfig(PartConfig):
    """FedDecorr: features that do not predict one another, against dimensional collapse."""

    name: Literal["decorrelation"] = "decorrelation"
    weight: float = Field(default=0.1, ge=0, le=1000, description="Weight of the sum over the views (FedDecorr: 0.1).")
    on: Literal["z", "h"] = Field(
        default="z",
        description="The embedding, as in the rows of SSD's tables, or the representation, as in FedDecorr itself.",
    )
    variant: Literal["reference", "paper"] = Field(
        default="reference",
        description="`reference` is FedDecorr's code, for which its weight was chosen: about batch_size times `paper`, "
        "||K||_F^2 / D^2 of the correlations K.",
    )

    def check(self, host: Host, model: ModelConfig) -> None:
        width = host.embedding_width(model) if self.on == "z" else model.encoder.feature_dim
        if width < 2:
            raise ValueError(f"decorrelation on {self.on} needs two features or more, and this model has one")


class DSRConfig(DimensionedConfig):
    """SSD's dimension-scaled regularisation: each client stretches embeddings along its own dimensions."""

    name: Literal["dsr"] = "dsr"
    gamma: float = Field(default=1.0, ge=0, le=1e6, description="gamma, its weight (SSD: 1).")
    alpha: float = Field(
        default=10.0, ge=0, le=1e6, description="alpha, the scale of the client's own dimensions (SSD: 10)."
    )
    variant: Literal["reference", "paper"] = Field(
        default="reference",
        description="`reference` is SSD's code: in a rotated basis, towards a target of unit length, by a norm that is "
        "not squared. `paper` is Eq. 7 on unit vectors; its gradient is about 60 times larger, so lower gamma with it.",
    )


class FedXConfig(PartConfig):
    """FedX: two-sided distillation, among a client's images and from the global model (Han et al. 2022)."""

    sends: ClassVar[bool] = True
    why_not_own_norms: ClassVar[str | None] = (
        "the add-on fedx distils from the global network, which would have no BatchNorm that was trained"
    )

    name: Literal["fedx"] = "fedx"
    local_contrastive: float = Field(
        default=1.0, ge=0, le=1000, description="Weight of the objective's own loss, L_c^local; 0 leaves it out."
    )
    local_relational: float = Field(
        default=1.0, ge=0, le=1000, description="Weight of L_r^local, Eq. 7; 0 leaves it out."
    )
    global_contrastive: float = Field(
        default=1.0, ge=0, le=1000, description="Weight of L_c^global, Eq. 9; 0 leaves it out."
    )
    global_relational: float = Field(
        default=1.0, ge=0, le=1000, description="Weight of L_r^global, Eq. 11; 0 leaves it out."
    )
    temperature: float = Field(default=0.1, gt=0, le=100, description="tau of Eq. 6, 9 and 10 (FedX: 0.1).")
    rel_kl: Literal["reference", "paper"] = Field(
        default="reference",
        description="Direction of Eq. 7's and 11's divergences: `reference` is FedX's code, KL(m || r), `paper` is "
        "KL(r || m) as printed.",
    )
    variant: Literal["reference", "paper"] = Field(
        default="reference",
        exclude_if=lambda it: it == "reference",
        description="Eq. 9: `reference` is FedX's code, NT-Xent with both networks' embeddings as anchors and the "
        "positive in the denominator; `paper` is as printed, with local anchors and without the positive there.",
    )
    relational: Literal["projections", "predictions"] = Field(
        default="projections",
        exclude_if=lambda it: it == "projections",
        description="z of Eq. 6 if the objective has a predictor (BYOL, SimSiam): the projector's outputs, or, as Eq. "
        "5 defines z, the predictor's.",
    )
    predictor: MLPConfig | None = Field(
        default=None,
        description="h of Eq. 9. None is FedX's code: Linear, ReLU, Linear, all as wide as the embedding, without "
        "BatchNorm. Its output is always as wide as the embedding.",
    )

    def check(self, host: Host, model: ModelConfig) -> None:
        if "views" not in host.traits or "projector" not in host.traits:
            raise ValueError(
                f"fedx compares the embeddings of two views of an image, and {host.name} does not compute them"
            )
        if model.projector is None:
            raise ValueError("fedx compares the outputs of projectors: describe model.projector")
        if self.relational == "predictions" and "predictor" not in host.traits:
            raise ValueError(
                f'fedx with relational = "predictions" compares the outputs of a predictor, and {host.name} has none: '
                'set "projections"'
            )
        weights = (self.local_contrastive, self.local_relational, self.global_contrastive, self.global_relational)
        if not any(weights):
            raise ValueError("all four weights of fedx are 0, so there is no loss: set one of them above 0")
        if host.merge.name == "local" and (self.global_contrastive or self.global_relational):
            raise ValueError(
                "fedx distils the global model, and with method.merge local there is none: set global_contrastive and "
                "global_relational to 0"
            )


class FURConfig(PartConfig):
    """FedU2's flexible uniform regulariser: embeddings spread evenly over the sphere."""

    name: Literal["fur"] = "fur"
    weight: float = Field(default=0.01, ge=0, le=1000, description="Weight of the sum over the views (FedU2: 0.01).")
    num_projections: int = Field(default=6, ge=1, le=1000, description="Number of random directions per tangent plane.")
    divisor: float = Field(
        default=6.0,
        gt=0,
        le=1e6,
        description="Divisor of the sum over the batch's tangent planes. FedU2's code has 6, so the term grows with "
        "the batch.",
    )


class HSDConfig(DimensionedConfig):
    """Hard separation, SSD's counterpart: each client's embeddings are pulled into its own dimensions, or masked."""

    name: Literal["hsd"] = "hsd"
    variant: Literal["mask", "projection"] = Field(
        default="projection",
        description="`projection`: the losses see all dimensions, and a term pulls each embedding to its projection "
        "onto the client's own ones, the limit of dsr for a large alpha. `mask`: the losses see only those.",
    )
    gamma: float = Field(
        default=1.0,
        ge=0,
        le=1e6,
        exclude_if=lambda it: it == 1,
        description="Weight of the term of `projection`, as dsr's.",
    )

    @model_validator(mode="after")
    def _only_a_projection_has_a_weight(self) -> "HSDConfig":
        if self.variant == "mask" and self.gamma != 1:
            raise ValueError('gamma of hsd weighs the term of variant = "projection": leave it out, or set the variant')
        return self

    def check(self, host: Host, model: ModelConfig) -> None:
        super().check(host, model)
        if any(add_on.name == "dsr" for add_on in host.add_ons):
            raise ValueError("hsd removes the dimensions that dsr would scale down: choose one of the two")
        if self.variant == "mask":
            self._check_mask(host)

    def _check_mask(self, host: Host) -> None:
        if "symmetric" not in host.traits:
            raise ValueError(
                f"hsd masks both sides of a comparison of embeddings, and {host.name} compares them with "
                "something else: "
                "use it with fedalignuniform or fedsimclr"
            )
        if "dimensions" in host.traits:
            raise ValueError(
                f"hsd sets all but the client's own dimensions to 0, and {host.name} asks every dimension to vary: use "
                "hsd with fedalignuniform or fedsimclr, or dsr with this objective"
            )
        if any(add_on.name == "fedx" for add_on in host.add_ons):
            raise ValueError(
                "hsd masks embeddings and fedx compares them with a teacher's unmasked ones: choose one of the two"
            )


class PDConfig(PartConfig):
    """SSD's projector distillation: the representation learns from the embedding."""

    name: Literal["pd"] = "pd"
    delta: float = Field(default=0.1, ge=0, le=1e6, description="delta, its weight (SSD: 0.1).")
    temperature: float = Field(
        default=0.5, gt=0, le=100, description="Temperature, only of `reference` (SSD's code: 0.5)."
    )
    variant: Literal["reference", "paper", "mse"] = Field(
        default="reference",
        description="`reference` is SSD's code, KL(z || h) at `temperature`; `paper` is Eq. 9, KL(h || z) at 1; `mse` "
        "is Table 5's mean square.",
    )

    def check(self, host: Host, model: ModelConfig) -> None:
        if "projector" not in host.traits or model.projector is None:
            raise ValueError("pd distils a projector's output into its input, so it needs a projector")
        h, z = model.encoder.feature_dim, model.projector.out_dim
        if h != z:
            raise ValueError(f"pd compares h, {h} wide, with z, {z} wide: set model.projector.out_dim to {h}")


class ProximalConfig(PartConfig):
    """FedProx: stay close to the global weights (Li et al. 2020, Eq. 2)."""

    needs_others: ClassVar[bool] = True
    why_not_own_norms: ClassVar[str | None] = (
        "the add-on proximal pulls all weights to the global ones, BatchNorm's scales and shifts included"
    )

    name: Literal["proximal"] = "proximal"
    mu: float = Field(
        default=0.01, ge=0, le=1000, description="mu of (mu/2)||w - w_g||^2. FLESD's code has no 1/2: double its mu."
    )


class ScaffoldConfig(PartConfig):
    """SCAFFOLD: control variates that take the drift out of every client's steps (Karimireddy et al. 2020)."""

    needs_others: ClassVar[bool] = True
    sends: ClassVar[bool] = True
    averaged_apart: ClassVar[str | None] = "control variates"
    restarts_states: ClassVar[bool] = True
    why_not_own_norms: ClassVar[str | None] = (
        "the add-on scaffold sends a control variate of every weight, BatchNorm's scales and shifts included"
    )

    name: Literal["scaffold"] = "scaffold"
    step_size: Literal["momentum", "plain"] = Field(
        default="momentum",
        description="The assumed length of a step per unit of gradient when the variates are computed (option II). "
        "`momentum`: lr / (1 - momentum), as SGD moves in the long run. `plain`: lr, as in NIID-Bench, "
        "whose variates are "
        "then 10 times gradients at momentum 0.9. Without momentum the two are equal.",
    )

    def check_training(self, training: TrainingConfig) -> None:
        if training.optimizer.name != "sgd":
            raise ValueError(
                "scaffold computes mean gradients from how far SGD moved the weights, which does not work with "
                f"{training.optimizer.name}: set training.optimizer.name to sgd"
            )
        if training.optimizer.warmup_rounds or training.optimizer.schedule == "cosine_per_step":
            raise ValueError(
                "scaffold computes mean gradients from how far a round's steps of one learning rate moved the weights: "
                "set training.optimizer.schedule to constant or cosine, and leave warmup_rounds out"
            )
        if training.optimizer.layer_decay != 1:
            raise ValueError(
                "scaffold computes mean gradients with one learning rate for all weights: leave "
                "training.optimizer.layer_decay out"
            )


AnyAddOn = Annotated[
    CrossedKLConfig
    | DecorrelationConfig
    | DSRConfig
    | FedXConfig
    | FURConfig
    | HSDConfig
    | PDConfig
    | ProximalConfig
    | ScaffoldConfig,
    Field(discriminator="name"),
]
