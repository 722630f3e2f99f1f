"""Training and aggregation: the only owners of optimisers. Simulation, workers and Celery tasks call these
functions."""

from fedssl.engine.aggregation import run_aggregation, start_run
from fedssl.engine.distillation import DistillationCheckpoint, DistillationProgress, epochs_done, run_distillation
from fedssl.engine.local import LocalProgress, LocalResult, run_local_round
from fedssl.engine.trainer import release_trainer

__all__ = [
    "DistillationCheckpoint",
    "DistillationProgress",
    "LocalProgress",
    "LocalResult",
    "epochs_done",
    "release_trainer",
    "run_aggregation",
    "run_distillation",
    "run_local_round",
    "start_run",
]
