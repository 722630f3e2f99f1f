"""How good an encoder is: probes, neighbours, geometry of the representations, and the picture of a run."""

from fedssl.evaluation.features import extract_features
from fedssl.evaluation.fine_tuning import (
    FINE_TUNINGS,
    FineTuneResult,
    FineTuneSettings,
    fine_tune,
    labelled_share,
)
from fedssl.evaluation.geometry import angle_between, effective_rank, feature_std, inter_class_angles
from fedssl.evaluation.neighbours import knn_accuracy
from fedssl.evaluation.plots import plot_curves
from fedssl.evaluation.probe import PROBES, ProbeResult, ProbeSettings, linear_probe

__all__ = [
    "FINE_TUNINGS",
    "PROBES",
    "FineTuneResult",
    "FineTuneSettings",
    "ProbeResult",
    "ProbeSettings",
    "angle_between",
    "effective_rank",
    "extract_features",
    "feature_std",
    "fine_tune",
    "inter_class_angles",
    "knn_accuracy",
    "labelled_share",
    "linear_probe",
    "plot_curves",
]
