from .aggregation import begin_aggregation, run_aggregation, start_run
from .distillation import DistillationCheckpoint, DistillationProgress, epochs_done, run_distillation
from .local import LocalProgress, LocalResult, run_local_round
from .trainer import release_trainer

__all__ = [
    "DistillationCheckpoint",
    "DistillationProgress",
    "LocalProgress",
    "LocalResult",
    "begin_aggregation",
    "epochs_done",
    "release_trainer",
    "run_aggregation",
    "run_distillation",
    "run_local_round",
    "start_run",
]
