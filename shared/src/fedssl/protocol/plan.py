"""The artifact plan: everything that may go down to a client and come up from it."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from fedssl.protocol.base import StrictModel

DType = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8"]
"""Element types, in safetensors' names."""

Kind = Literal[
    "weights", "centers", "similarity", "representations", "control", "centroids", "dictionary", "probe-sums"
]
"""The content of a tensor, for the data owner whose policy must permit it."""

SENT_APART: tuple[Kind, ...] = ("centroids",)
"""The kinds that leave next to a secure sum without masks. They never leave without that sum in such a run."""

Reduction = Literal["mean", "integral_mean", "sum", "keep", "method"]
"""How the coordinator combines a tensor over all updates: weighted mean; weighted mean rounded to whole numbers; sum
(of counts and of sums over images); keep the broadcast's value, which the server enforces; or the method's own rule."""

MOST_TENSORS = 100_000
"""The most tensors in one direction. The largest network here has fewer than 1,000."""

TensorName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length=256)]


class TensorSpec(StrictModel):
    """One declared tensor."""

    name: TensorName
    dtype: DType
    shape: tuple[Annotated[int, Field(ge=0, lt=2**48)], ...] = Field(max_length=8)
    kind: Kind = "weights"
    reduce: Reduction = "mean"


class ArtifactPlan(StrictModel):
    """Everything that is exchanged in one run. A tensor that is not in it neither leaves a client nor is stored."""

    broadcast: tuple[TensorSpec, ...] = Field(
        max_length=MOST_TENSORS, description="Coordinator to clients, the same for the whole cohort."
    )
    update: tuple[TensorSpec, ...] = Field(max_length=MOST_TENSORS, description="One client to the coordinator.")
    frozen: tuple[TensorSpec, ...] = Field(
        default=(),
        max_length=MOST_TENSORS,
        exclude_if=lambda it: not it,
        description="Coordinator to clients, once per run: the encoder's tensors that no round changes.",
    )

    @property
    def received(self) -> tuple[TensorSpec, ...]:
        """The tensors that a client has when it begins a round: the broadcast and the frozen tensors."""
        return self.broadcast + self.frozen

    @model_validator(mode="after")
    def _names_are_unique(self) -> "ArtifactPlan":
        for direction, tensors in (("broadcast", self.received), ("update", self.update)):
            names = [t.name for t in tensors]
            if len(set(names)) != len(names):
                raise ValueError(f"the plan's {direction} declares a tensor twice")
        return self
