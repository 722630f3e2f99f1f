"""Config of FLESD's reducer: clients send similarities of public images, the coordinator distils them."""

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from fedssl.protocol.base import ClientId
from fedssl.protocol.data import PublicDataConfig
from fedssl.protocol.methods.parts import PartConfig
from fedssl.protocol.model import EncoderConfig, ModelConfig
from fedssl.protocol.training import OptimizerConfig

if TYPE_CHECKING:
    from fedssl.protocol.methods.composed import ComposedConfig

Packing = Literal["factored-f32", "factored-f16", "triangle-f16", "triangle-i8"]

LARGEST_TRIANGLE = 1 << 14
"""Public images whose pairwise similarities are still sent one by one: 134 million of them."""


class DistillationConfig(PartConfig):
    """FLESD: clients send how similar public images are to them, and no weights; the coordinator trains a student to
    find the same similarities. The student's weights are the global model."""

    name: Literal["distillation"] = "distillation"
    packing: Packing = Field(
        default="factored-f32",
        description="How similarities travel. `factored`: the unit embeddings whose products they are, N x D numbers. "
        "`triangle`: each pair's cosine, N (N - 1) / 2 numbers, which hold no embeddings; 16384 images at most.",
    )
    num_epochs: int = Field(default=200, ge=1, le=100_000, description="Passes over the public images (FLESD: 200).")
    batch_size: int = Field(default=128, ge=2, le=65_536, description="B' (FLESD: 128).")
    num_anchors: int = Field(
        default=2048,
        ge=2,
        le=1_000_000,
        description="m, the momentum queue's length (FLESD: 2048). There must be more public images than that.",
    )
    momentum: float = Field(default=0.999, ge=0, le=1, description="zeta of the momentum encoder (FLESD: 0.999).")
    temperature: float = Field(
        default=0.1, gt=0, le=100, description="tau_T of the clients' similarities (FLESD: 0.1)."
    )
    student_temperature: float | None = Field(
        default=None, gt=0, le=100, description="tau_S of the student's; None: tau_T, as in FLESD."
    )
    skip: Literal["first_epoch", "every_epoch"] = Field(
        default="first_epoch",
        description="Steps that only fill the queue: once, or at every epoch's start as in FLESD's code, which then "
        "never trains where an epoch is no longer than the queue.",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(name="adam", learning_rate=1e-3, weight_decay=1e-6),
        description="Of the student, made anew every round (FLESD: Adam, 1e-3, weight decay 1e-6).",
    )
    client_encoders: dict[ClientId, EncoderConfig] = Field(
        default={},
        description="Clients that train another encoder than model.encoder. Each keeps its own network from round to "
        "round and does not take the student's.",
    )

    @model_validator(mode="after")
    def _possible(self) -> "DistillationConfig":
        if self.batch_size > self.num_anchors:
            raise ValueError("reducer.batch_size is larger than reducer.num_anchors: a batch must fit into the queue")
        if self.optimizer.schedule != "constant":
            raise ValueError(
                "reducer.optimizer.schedule must be constant: schedules are for local training, over rounds"
            )
        return self

    def check(self, host: "ComposedConfig", model: ModelConfig) -> None:
        if "views" not in host.traits or "predictor" in host.traits or host.needs_others:
            raise ValueError(
                f"distillation makes an encoder and a projector, and {host.name} trains more that is shared: "
                "take flesd, fedsimclr, fedmoco or fedalignuniform"
            )
        if sending := [add_on.name for add_on in host.add_ons if add_on.sends]:
            raise ValueError(f"with distillation only similarities leave a client, and {sending[0]} must send weights")
        if self.client_encoders:
            self._check_encoders(host, model)

    def _check_encoders(self, host: "ComposedConfig", model: ModelConfig) -> None:
        if wanting := [add_on.name for add_on in host.add_ons if add_on.needs_others]:
            raise ValueError(f"{wanting[0]} needs the global weights, which do not fit the clients of client_encoders")
        for client, encoder in self.client_encoders.items():
            own = model.model_copy(update={"encoder": encoder})
            if self.packing.startswith("factored") and host.embedding_width(own) != host.embedding_width(model):
                raise ValueError(
                    f"the encoder of {client} makes {host.embedding_width(own)} numbers an image, the others "
                    f"{host.embedding_width(model)}: set model.projector, or send triangles"
                )
            for add_on in host.add_ons:
                add_on.check(host, own)

    def check_public_data(self, public_data: PublicDataConfig | None) -> None:
        if public_data is None:
            raise ValueError("distillation needs images that everybody holds: add a [public_data] section")
        size = public_data.num_images
        if size <= self.num_anchors:
            raise ValueError(
                f"distillation's queue of {self.num_anchors} needs more than {size} public images: "
                "raise public_data.num_images or lower method.reducer.num_anchors"
            )
        if self.packing.startswith("triangle") and size > LARGEST_TRIANGLE:
            raise ValueError(
                f"{size} public images have {size * (size - 1) // 2:,} pairs: take a factored packing, or at most "
                f"{LARGEST_TRIANGLE} images"
            )
        epochs_that_train = self.num_epochs if self.skip == "first_epoch" else 1
        if epochs_that_train * math.ceil((size - 1) / self.batch_size) <= self.num_filling_steps:
            raise ValueError(
                "distillation would only fill its queue and never train: raise public_data.num_images, lower "
                "method.reducer.num_anchors or, where skip is every_epoch, take first_epoch"
            )

    @property
    def num_filling_steps(self) -> int:
        """Steps until the queue is full."""
        return math.ceil(self.num_anchors / self.batch_size)
