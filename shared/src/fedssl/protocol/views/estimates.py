"""The estimate of a run, before it is created: the bytes that it would send, and the time that it would take."""

from pydantic import BaseModel, ConfigDict, Field

from fedssl.protocol.base import ClientId
from fedssl.protocol.projects import WantedProject
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views.base import View


class EstimateRequest(BaseModel):
    """The spec of a run that might be created."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: RunSpec
    project: WantedProject = Field(
        default=None, description="The project of the run. Null: that of the token, or else `default`."
    )


class EstimateView(View):
    """The bytes and the time of a run. Bytes are exact if every client delivers once; times are estimates."""

    clients: list[ClientId] = Field(description="The registered clients that would take part.")
    left_out: dict[ClientId, str] = Field(description="Those that would not, with the reason.")
    num_missing: int = Field(description="For how many more clients the first round would wait.")
    clients_per_round: int = Field(description="The number of clients to which each round would be offered.")
    bytes_down_per_client: int | None = Field(description="Per round. Null: not known.")
    bytes_up_per_client: int | None = Field(description="Per round. Null: not known.")
    bytes_in_total: int | None = Field(description="The sum over all rounds and both directions. Null: not known.")
    is_measuring: bool = Field(description="An aggregator is computing the bytes: the next request has them.")
    seconds_per_round: float | None = Field(
        description="From the work of these clients, or of others, in earlier runs with the same method, encoder and "
        "image size. Null: there has been none."
    )
    seconds_in_total: float | None
    num_measured: int = Field(description="The number of accepted updates on which the times are based.")
