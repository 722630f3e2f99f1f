"""Evaluations at the sites, as the API shows them."""

from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from fedssl.protocol.base import ClientId, Digest
from fedssl.protocol.evaluation import SiteMeasure
from fedssl.protocol.states import SiteEvaluationState
from fedssl.protocol.views.base import View
from fedssl.protocol.views.evaluations import Results


class SiteEvaluationsCreate(BaseModel):
    """A request to the sites of a run to evaluate the encoder of a round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    round_number: int | None = Field(
        default=None, ge=0, le=100_000, description="The round; 0 is the model before training, null the newest round."
    )


class SiteEvaluationView(View):
    """One site's evaluation of one round's encoder."""

    id: UUID
    client_id: ClientId
    state: SiteEvaluationState
    reason: str | None = Field(description="Why the site has no results, or has sent no classifier of its own.")
    classes: tuple[int, ...] | None = Field(
        description="The numbers of the evaluated classes; the others have too few images at this site. Null if the "
        "site has no results."
    )
    num_train: int | None
    num_test: int | None
    results: Results | None = Field(description="By name, such as `probe/accuracy`. Null if the site has none.")
    created_at: datetime
    ended_at: datetime | None


class WorstSiteView(View):
    """The site with the lowest value of a result; null stands for NaN, which is worse than all others."""

    client_id: ClientId
    value: float | None


class SiteRoundView(View):
    """The evaluations of one round's encoder at all sites. Only sites that have answered count in the results."""

    run_id: UUID
    round_number: int = Field(description="The round, or 0 before training.")
    model: Digest
    sites: tuple[SiteEvaluationView, ...]
    mean: Results = Field(description="The mean over the sites.")
    pooled: Results = Field(description="The results of the sums of all sites' counts.")
    worst: dict[str, WorstSiteView]


class CrossSiteCell(View):
    """The evaluation of one site's classifier by another site. Without results until that site has answered."""

    head_of: ClientId = Field(description="The site whose classifier it is.")
    client_id: ClientId = Field(description="The site that evaluates it, on its own images.")
    state: SiteEvaluationState
    reason: str | None = Field(description="Why there are no results.")
    num_test: int | None
    results: Results | None = Field(description="By name, such as `probe/accuracy`. Null if there are none.")


class CrossSiteView(View):
    """The sites' own classifiers of one round, each evaluated by every other site."""

    run_id: UUID
    round_number: int = Field(description="The round, or 0 before training.")
    measure: SiteMeasure = Field(description="Which classifier: `probe`, trained for the evaluation, or `personal`.")
    own: dict[ClientId, Results] = Field(description="Each site's results of its own classifier, on its own images.")
    cells: tuple[CrossSiteCell, ...]
