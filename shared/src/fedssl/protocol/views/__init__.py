"""The requests and answers of the API, a module per noun."""

from fedssl.protocol.views.base import Page, View
from fedssl.protocol.views.clients import (
    ClientEdit,
    ClientView,
    FederationCardView,
    IdentityConfirmation,
    LedgerAnchorView,
    SiteCardView,
)
from fedssl.protocol.views.datasets import (
    EvaluationDatasetCreate,
    EvaluationDatasetView,
    PublicDatasetCreate,
    PublicDatasetView,
)
from fedssl.protocol.views.distillation import DistillationJobView
from fedssl.protocol.views.estimates import EstimateRequest, EstimateView
from fedssl.protocol.views.evaluations import (
    EmbeddingMapView,
    EvaluationCreate,
    EvaluationProgress,
    EvaluationView,
    Results,
)
from fedssl.protocol.views.events import EventView, MetricView
from fedssl.protocol.views.health import Health
from fedssl.protocol.views.methods import MethodView
from fedssl.protocol.views.notifications import DeliveryView, DestinationCreate, DestinationCreated, DestinationView
from fedssl.protocol.views.projects import ProjectCreate, ProjectView
from fedssl.protocol.views.rounds import AssignmentView, RoundView, SecureRoundView
from fedssl.protocol.views.runs import DimensionAssignmentView, RunContinue, RunCreate, RunEdit, RunSummary, RunView
from fedssl.protocol.views.site_evaluations import (
    CrossSiteCell,
    CrossSiteView,
    SiteEvaluationsCreate,
    SiteEvaluationView,
    SiteRoundView,
    WorstSiteView,
)
from fedssl.protocol.views.tokens import EnrolmentCreate, TokenCreate, TokenCreated, TokenView
from fedssl.protocol.views.uploads import UploadPart, UploadParts
from fedssl.protocol.views.weights import WeightsCreate, WeightsView

__all__ = [
    "AssignmentView",
    "ClientEdit",
    "ClientView",
    "CrossSiteCell",
    "CrossSiteView",
    "DeliveryView",
    "DestinationCreate",
    "DestinationCreated",
    "DestinationView",
    "DimensionAssignmentView",
    "DistillationJobView",
    "EmbeddingMapView",
    "EnrolmentCreate",
    "EstimateRequest",
    "EstimateView",
    "EvaluationCreate",
    "EvaluationDatasetCreate",
    "EvaluationDatasetView",
    "EvaluationProgress",
    "EvaluationView",
    "EventView",
    "FederationCardView",
    "Health",
    "IdentityConfirmation",
    "LedgerAnchorView",
    "MethodView",
    "MetricView",
    "Page",
    "ProjectCreate",
    "ProjectView",
    "PublicDatasetCreate",
    "PublicDatasetView",
    "Results",
    "RoundView",
    "RunContinue",
    "RunCreate",
    "RunEdit",
    "RunSummary",
    "RunView",
    "SecureRoundView",
    "SiteCardView",
    "SiteEvaluationView",
    "SiteEvaluationsCreate",
    "SiteRoundView",
    "TokenCreate",
    "TokenCreated",
    "TokenView",
    "UploadPart",
    "UploadParts",
    "View",
    "WeightsCreate",
    "WeightsView",
    "WorstSiteView",
]
