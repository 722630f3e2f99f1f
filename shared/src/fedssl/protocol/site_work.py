"""The requests and answers of evaluations at the sites.

There is no lease: counts stay, and a refusal stays until the evaluation is requested again.
"""

from typing import Annotated
from uuid import UUID

from pydantic import Field, model_validator

from fedssl.protocol.base import ClientId, Digest, StrictModel
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts, SiteHead
from fedssl.protocol.states import SiteEvaluationState
from fedssl.protocol.work import AcceptedUpdate, Anchor, Count, Receipt, ShortText

EVALUATIONS_HEADER = "Fedssl-Site-Evaluations"
"""The header of a claim's answer: 1 if there is an evaluation for this site, which the claim has asked for with
`site_evaluations`, otherwise 0. Older coordinators do not send it, and refuse claims that ask for it."""

ANSWER_BYTES = 1 << 20
"""The limit of an answer. Two measures of 100 classes and 50 score bins have 40,000 counts, and the largest classifier
of a site takes 700 kB."""

EvaluatedRound = Annotated[int, Field(ge=0, le=100_000, description="0 is the model before training.")]


class SiteEvaluationItem(StrictModel):
    """The encoder of one round, to be evaluated by one site on its own labelled images."""

    evaluation_id: UUID
    run_id: UUID
    round_number: EvaluatedRound
    client_id: ClientId
    spec: RunSpec
    method_version: Count
    plan: ArtifactPlan
    broadcast: Digest = Field(description="The weights after the round.")
    last_accepted: AcceptedUpdate | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="The client's newest accepted update up to this round, with which it wrote the state that has its "
        'BatchNorm (`model.batch_norm = "local"`) or its personal classifier. Null if there is none, or if the run '
        "needs neither.",
    )
    head: SiteHead | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="The classifier of another site, `head_of`, to be evaluated in place of this site's own.",
    )
    head_of: ClientId | None = Field(default=None, exclude_if=lambda it: it is None)


class SiteAnswer(StrictModel):
    """A site's counts, or why it has none."""

    evaluation_id: UUID
    round_number: EvaluatedRound
    counts: SiteCounts | None = None
    head: SiteHead | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="This site's own classifier, if the spec has `evaluation.sites.cross_site`.",
    )
    no_head: ShortText | None = Field(
        default=None, exclude_if=lambda it: it is None, description="Why it sends no classifier of its own."
    )
    refusal: ShortText | None = Field(default=None, description="Why this site does not evaluate this round.")
    anchor: Anchor = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "SiteAnswer":
        if (self.counts is None) == (self.refusal is None):
            raise ValueError("give either counts or refusal")
        if (self.head is not None) + (self.no_head is not None) > (self.counts is not None):
            raise ValueError("with counts, give head or no_head or neither")
        return self


class SiteAnswered(StrictModel):
    """The coordinator keeps the answer. The same answer again gets the same reply."""

    evaluation_id: UUID
    state: SiteEvaluationState
    receipt: Receipt = None
