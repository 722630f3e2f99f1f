"""How the coordinator adds up updates, and what it does with their mean."""

from typing import Literal

from pydantic import Field

from fedssl.protocol.base import StrictModel


class ServerOptimizerConfig(StrictModel):
    """The optimiser of the coordinator. It takes the clients' mean minus the broadcast as the direction of its step.

    It moves the weights that the coordinator averages. It does not change how BatchNorm's statistics, and tensors of
    other kinds such as centers and control variates, are combined.
    """

    name: Literal["fedavgm", "fedadam"] = Field(
        description="`fedavgm`: SGD with momentum (Hsu et al. 2019); `fedadam`: Adam without correction of its moments "
        "(Reddi et al. 2021, Algorithm 2)."
    )
    learning_rate: float = Field(
        gt=0,
        le=100,
        description="The coordinator's. With FedAvgM 1 is Hsu et al.'s; with FedAdam each step moves a weight by about "
        "this much: 0.001 to 0.1.",
    )
    beta_1: float = Field(default=0.9, ge=0, lt=1, description="The factor of the momentum, or of FedAdam's m.")
    beta_2: float = Field(default=0.99, ge=0, lt=1, description="FedAdam only: the factor of v.")
    tau: float = Field(
        default=1e-3,
        gt=0,
        le=1,
        description="FedAdam only: added to the root of v, which starts from tau^2. The smaller, the more adaptive.",
    )


class EncoderAverageConfig(StrictModel):
    """An exponential moving average of the global encoder over the rounds: a <- decay a + (1 - decay) x.

    Clients continue from x, as they would without it. The average is the encoder that is evaluated, pulled and
    exported, and from which other runs start.
    """

    decay: float = Field(
        gt=0,
        lt=1,
        description="How much of the average stays in each round. About the last 1 / (1 - decay) rounds count: 0.9 for "
        "runs of some ten rounds, 0.99 for some hundred.",
    )


class AggregationConfig(StrictModel):
    """How the coordinator computes its weighted means."""

    arithmetic: Literal["float", "fixed"] = Field(
        default="float",
        description="`float`: running means in float64, in the order of the clients' names. `fixed`: each client's "
        "difference from the broadcast, times its weight, is rounded once to an integer on a public scale: any order "
        "and any tree of partial sums gives the same bits. If a value does not fit, nothing is clipped: the update is "
        "left out, or a secure round is skipped, and the tensor is named. Only for methods whose coordinator computes "
        "weighted means.",
    )
    matrix_bits: Literal[32, 64] = Field(
        default=64,
        exclude_if=lambda it: it == 64,
        description="Only with `fixed`: the bits of the integers that matrices are rounded to. 32: on scales that "
        "follow from the broadcast, which halves what a client sends in a secure round. The first round has 64, and so "
        "has the round after one without a result, such as a secure one in which a value did not fit.",
    )
    server_optimizer: ServerOptimizerConfig | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="How the coordinator moves the weights. Null: they become the clients' mean. Only for "
        "methods whose coordinator computes weighted sums.",
    )
    encoder_average: EncoderAverageConfig | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="A moving average of the global encoder, which is evaluated and exported in its place. Null: the "
        "encoder of the last round is.",
    )
