"""How good an encoder is: probes, neighbours, geometry of the representations, and pictures."""

from fedssl.evaluation.angles import Angles, compare_embeddings
from fedssl.evaluation.features import extract_features, labels_of
from fedssl.evaluation.fine_tuning import (
    FINE_TUNINGS,
    FineTuneResult,
    FineTuneSettings,
    fine_tune,
    labelled_share,
    semi_supervised,
)
from fedssl.evaluation.geometry import (
    alignment,
    angle_between,
    effective_rank,
    feature_std,
    inter_class_angles,
    uniformity,
)
from fedssl.evaluation.maps import aligned_map, plot_map, project
from fedssl.evaluation.neighbours import knn_accuracy
from fedssl.evaluation.plots import plot_curves
from fedssl.evaluation.probe import PROBES, ProbeResult, ProbeSettings, linear_probe, probe_encoder
from fedssl.evaluation.transfer import TRANSFERS, TransferResult, transfer
from fedssl.protocol.evaluation import MapMethod
from fedssl.selection import Choice, choose_best

__all__ = [
    "FINE_TUNINGS",
    "PROBES",
    "TRANSFERS",
    "Angles",
    "Choice",
    "FineTuneResult",
    "FineTuneSettings",
    "MapMethod",
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
    "labelled_share",
    "labels_of",
    "linear_probe",
    "plot_curves",
    "plot_map",
    "probe_encoder",
    "project",
    "semi_supervised",
    "transfer",
    "uniformity",
]
