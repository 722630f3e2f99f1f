from .angles import Angles, compare_embeddings
from .features import extract_features, labels_of
from .fine_tuning import (
    FINE_TUNINGS,
    FineTuneResult,
    FineTuneSettings,
    fine_tune,
    labelled_share,
    semi_supervised,
)
from .geometry import (
    alignment,
    angle_between,
    effective_rank,
    feature_std,
    inter_class_angles,
    uniformity,
)
from .maps import aligned_map, plot_map, project
from .neighbour_plot import plot_neighbours
from .neighbours import knn_accuracy, knn_scores, nearest
from .plots import plot_curves
from .probe import PROBES, ProbeResult, ProbeSettings, linear_probe, probe_encoder
from .ridge import require_sums, ridge_path, ridge_solution, ridge_sums
from .selection import BestRound, choose_best
from .transfer_learning import TRANSFERS, TransferResult, transfer

__all__ = [
    "FINE_TUNINGS",
    "PROBES",
    "TRANSFERS",
    "Angles",
    "BestRound",
    "FineTuneResult",
    "FineTuneSettings",
    "ProbeResult",
    "ProbeSettings",
    "TransferResult",
    "aligned_map",
    "alignment",
    "angle_between",
    "choose_best",
    "compare_embeddings",
    "effective_rank",
    "extract_features",
    "feature_std",
    "fine_tune",
    "inter_class_angles",
    "knn_accuracy",
    "knn_scores",
    "labelled_share",
    "labels_of",
    "linear_probe",
    "nearest",
    "plot_curves",
    "plot_map",
    "plot_neighbours",
    "probe_encoder",
    "project",
    "require_sums",
    "ridge_path",
    "ridge_solution",
    "ridge_sums",
    "semi_supervised",
    "transfer",
    "uniformity",
]
