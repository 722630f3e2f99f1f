"""A whole federation on one machine: what it starts from, its rounds, their evaluations and the result."""

from fedssl.simulation.evaluations import OnEvaluation, OnJudging
from fedssl.simulation.federation import OnDistillation, OnProgress, OnTrained
from fedssl.simulation.results import Checkpoint, Result, RoundRecord, judged_models
from fedssl.simulation.simulator import simulate

__all__ = [
    "Checkpoint",
    "OnDistillation",
    "OnEvaluation",
    "OnJudging",
    "OnProgress",
    "OnTrained",
    "Result",
    "RoundRecord",
    "judged_models",
    "simulate",
]
