"""Config of FLESD's reducer: clients send similarities of public images, the coordinator distils them."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, WrapValidator, model_validator

from fedssl.errors import SpecError
from fedssl.protocol.base import ClientId, StrictModel
from fedssl.protocol.data import PublicDataConfig
from fedssl.protocol.methods.base import MethodConfig
from fedssl.protocol.methods.parts import Host, PartConfig
from fedssl.protocol.model import EncoderConfig, ModelConfig
from fedssl.protocol.training import OptimizerConfig

Packing = Literal[
    "factored-f32", "factored-f16", "representations-f32", "representations-f16", "triangle-f16", "triangle-i8"
]
Form = Literal["factored", "representations", "triangle"]

LARGEST_TRIANGLE = 1 << 14
"""The largest number of public images whose pairwise similarities are sent one by one: 134 million of them."""

_EncodersByClient = dict[ClientId, EncoderConfig]
_by_client: TypeAdapter[_EncodersByClient] = TypeAdapter(_EncodersByClient)


def _one_reading(value: Any, _: object) -> Any:
    """Read text as the word and anything else as a table, so that an error is reported once, with its place."""
    if not isinstance(value, str):
        return _by_client.validate_python(value)
    if value != "declared":
        raise ValueError('method.reducer.client_encoders must be a table of encoders by client, or "declared"')
    return value


class ClientDistillationConfig(StrictModel):
    """How a client with an encoder of its own uses the student that the coordinator trained.

    The broadcast is the student, as for all clients. Such a client computes the student's similarities of the public
    images. Before its local training, it trains its own network to find the same, with the coordinator's loss and
    optimiser. It skips the first round, whose broadcast is untrained. FLESD has no such step: it is off by default.
    """

    num_epochs: int = Field(default=10, ge=1, le=100_000, description="Passes over the public images per round.")


class DistillationConfig(PartConfig):
    """FLESD: clients send their networks' similarities of public images, and no weights; the coordinator trains a
    student to find the same similarities. The student's weights are the global model."""

    why_not_summed: ClassVar[str | None] = "method.reducer distillation uses each client's similarities by themselves"

    name: Literal["distillation"] = "distillation"
    packing: Packing = Field(
        default="factored-f32",
        description="How similarities are sent. `factored`: a factor of the similarity matrix that depends only on the "
        "matrix (pivoted Cholesky), N x D numbers; it reveals what the matrix reveals. `representations`: the unit "
        "embeddings, as FLESD's code sends them; they reveal the same matrix and the axes of the client's own network. "
        "`triangle`: each pair's cosine, N (N - 1) / 2 numbers, for 16384 images at most. With more images than "
        "dimensions, each of them reveals the embeddings up to a rotation: the images are hidden, not what is similar.",
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
        default=None, gt=0, le=100, description="tau_S of the student's similarities; if None, tau_T, as in FLESD."
    )
    skip: Literal["first_epoch", "every_epoch"] = Field(
        default="first_epoch",
        description="When steps only fill the queue: once, or at the start of each epoch as in FLESD's code, which "
        "never trains if an epoch is no longer than the queue.",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(name="adam", learning_rate=1e-3, weight_decay=1e-6),
        description="The student's optimiser, fresh in each round (FLESD: Adam, 1e-3, weight decay 1e-6).",
    )
    client_encoders: Annotated[_EncodersByClient | Literal["declared"], WrapValidator(_one_reading)] = Field(
        default={},
        description="Clients that train another encoder than model.encoder. Each keeps its own network from round to "
        "round and does not take the student's. `declared`: as their workers declared at registration; the coordinator "
        "writes the encoders into the run's spec when the run is created.",
    )
    client_distillation: ClientDistillationConfig | None = Field(
        default=None,
        description="Clients with an encoder of their own learn from the student before they train. If None, they do "
        "not, as in FLESD.",
    )

    @model_validator(mode="after")
    def _possible(self) -> "DistillationConfig":
        if self.batch_size > self.num_anchors:
            raise ValueError("reducer.batch_size is larger than reducer.num_anchors: a batch must fit into the queue")
        if self.optimizer.schedule != "constant" or self.optimizer.changes_per_step:
            raise ValueError(
                "reducer.optimizer.schedule must be constant, without warmup_rounds and final_weight_decay: schedules "
                "are for local training, over rounds"
            )
        if self.optimizer.layer_decay != 1:
            raise ValueError("reducer.optimizer.layer_decay is for local training: leave it out")
        return self

    def check(self, host: Host, model: ModelConfig) -> None:
        if "views" not in host.traits or {"predictor", "prototypes"} & host.traits or host.needs_others:
            raise ValueError(
                f"distillation trains an encoder and a projector, and {host.name} shares more than these: "
                "use flesd, fedsimclr, fedmoco, fedalignuniform, fedvicreg or fedbarlow"
            )
        if sending := [add_on.name for add_on in host.add_ons if add_on.sends]:
            raise ValueError(
                f"with distillation only similarities leave a client, and {sending[0]} must send weights: remove it"
            )
        if model.freezes:
            raise ValueError(
                "with distillation the coordinator trains the whole encoder, and clients send similarities in place of "
                "weights: leave model.trainable and model.lora out, or choose another reducer"
            )
        if model.batch_norm != "average":
            raise ValueError(
                "with distillation the coordinator trains the whole encoder, BatchNorm included: leave "
                "model.batch_norm out, or choose another reducer"
            )
        if self.client_encoders == "declared" or self.client_encoders:
            self._check_add_ons(host)
            if model.initial is not None:
                raise ValueError(
                    "model.initial is an encoder for all clients, and client_encoders gives some of them another one, "
                    "which would start from random weights: use one of the two"
                )
        if self.client_encoders != "declared":
            for client, encoder in self.client_encoders.items():
                self._check_encoder(host, model, client, encoder)

    def _check_add_ons(self, host: Host) -> None:
        if wanting := [add_on.name for add_on in host.add_ons if add_on.needs_others]:
            raise ValueError(f"{wanting[0]} needs the global weights, which do not fit the clients of client_encoders")

    def _check_encoder(self, host: Host, model: ModelConfig, client: str, encoder: EncoderConfig) -> None:
        own = model.model_copy(update={"encoder": encoder})
        if self.form == "representations" and host.embedding_width(own) != host.embedding_width(model):
            raise ValueError(
                f"the encoder of {client} outputs {host.embedding_width(own)} numbers per image, the others "
                f"{host.embedding_width(model)}: set model.projector, or choose another packing"
            )
        for part in (*host.add_ons, host.merge):
            part.check(host, own)

    def check_public_data(self, public_data: PublicDataConfig | None) -> None:
        if public_data is None:
            raise ValueError(
                "distillation needs public images, which all clients and the coordinator hold: add a "
                "[public_data] section"
            )
        size = public_data.num_images
        if size <= self.num_anchors:
            raise ValueError(
                f"distillation's queue of {self.num_anchors} needs more than {self.num_anchors} public images, and "
                f"there are {size}: raise public_data.num_images or lower method.reducer.num_anchors"
            )
        if self.form == "triangle" and size > LARGEST_TRIANGLE:
            raise ValueError(
                f"{size} public images have {size * (size - 1) // 2:,} pairs: use packing factored-f32, or at most "
                f"{LARGEST_TRIANGLE} images"
            )
        fewest = min(self.num_epochs, self.client_distillation.num_epochs if self.client_distillation else math.inf)
        epochs_that_train = fewest if self.skip == "first_epoch" else 1
        if epochs_that_train * math.ceil((size - 1) / self.batch_size) <= self.num_filling_steps:
            raise ValueError(
                "distillation would only fill its queue and never train: raise public_data.num_images, lower "
                "method.reducer.num_anchors or, if skip is every_epoch, set it to first_epoch"
            )

    @property
    def form(self) -> Form:
        """Return the packing without its element type."""
        form: Form = self.packing.split("-")[0]  # type: ignore[assignment]
        return form

    @property
    def own_encoders(self) -> _EncodersByClient:
        """The clients with their own encoder. Raises SpecError while the spec has "declared"."""
        if self.client_encoders == "declared":
            raise SpecError(
                'method.reducer.client_encoders is "declared", which only a coordinator can resolve: write the '
                'encoders out, for example client_encoders = { client-1 = { name = "resnet18" } }'
            )
        return self.client_encoders

    def encoder_of(self, client_id: str, model: ModelConfig) -> EncoderConfig:
        """Return the encoder that this client trains. Raises SpecError while the spec has "declared"."""
        return self.own_encoders.get(client_id, model.encoder)

    def distillation_epochs(self, round_number: int) -> int:
        return self.num_epochs if round_number else 0

    @property
    def num_filling_steps(self) -> int:
        """The number of steps until the queue is full."""
        return math.ceil(self.num_anchors / self.batch_size)


def distillation_of(method: MethodConfig) -> DistillationConfig | None:
    """Return the method's distillation, or None if its clients send weights."""
    reducer = getattr(method, "reducer", None)
    return reducer if isinstance(reducer, DistillationConfig) else None
