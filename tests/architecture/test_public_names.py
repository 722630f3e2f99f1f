"""The public names and signatures that must stay, because notebooks and other people's tests use them."""

import inspect

import pytest

import fedssl.aggregation
import fedssl.data
import fedssl.evaluation
import fedssl.local
import fedssl.losses
import fedssl.models
import fedssl.simulation

LOSSES = {
    "multi_crop_nt_xent": "z_VBD, temperature",
    "nt_xent": "z1_BD, z2_BD, temperature",
    "info_nce": "query_BD, key_BD, queue_QD, temperature",
    "cross_model_contrast": "local_BD, global_BD, temperature",
    "cross_view_info_nce": "z1_BD, z2_BD, temperature",
    "byol_regression": "prediction_BD, target_BD",
    "relational_divergence": "a_BD, b_BD, references_RD, temperature, variant=reference",
    "alignment": "z1_BD, z2_BD",
    "uniformity": "z_BD, t=2.0",
    "dimension_scaled": "z_BD, scale_D, rotation_DD=None, variant=reference",
    "projector_distillation": "h_BD, z_BD, temperature=0.5, variant=reference",
    "student_t_assignment": "z_BD, centers_MD, exponent=-0.5",
    "target_distribution": "q_BM",
    "crossed_kl": "q_online_a, q_online_b, q_target_a, q_target_b",
    "decorrelation": "z_BD",
    "proximal": "parameters, reference, mu",
    "dino": "student_VBP, teacher_VBP, center_P, student_temperature, teacher_temperature",
    "dino_center": "center_P, teacher_VBP, momentum",
    "vicreg": "z1_BD, z2_BD, invariance=25.0, variance=25.0, covariance=1.0, variant=reference",
    "barlow_twins": "z1_BD, z2_BD, off_diagonal=0.0051",
    "masked_reconstruction": "prediction_BNP, patches_BNP, mask_BN, normalize=True",
}
AGGREGATION = {
    "weighted_mean": "updates, weights",
    "layerwise_divergence_aware": "updates, previous",
    "min_norm_weights": "gradients_KP",
    "ensemble_similarity": "representations, rows, anchors, temperature",
}


def _signature(function: object) -> str:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_keep_their_signatures(name: str) -> None:
    # Further arguments may follow those listed.
    assert f"{_signature(getattr(fedssl.losses, name))}, ".startswith(f"{LOSSES[name]}, ")


@pytest.mark.parametrize("name", AGGREGATION)
def test_aggregation_functions_keep_their_signatures(name: str) -> None:
    # Further arguments may follow those listed.
    assert f"{_signature(getattr(fedssl.aggregation, name))}, ".startswith(f"{AGGREGATION[name]}, ")


def test_evaluation_data_and_simulation_keep_their_names() -> None:
    for name in ("effective_rank", "linear_probe", "knn_accuracy", "fine_tune", "angle_between"):
        assert callable(getattr(fedssl.evaluation, name))
    assert _signature(fedssl.evaluation.ridge_sums) == "h_NH, labels_N, num_classes"
    assert _signature(fedssl.evaluation.ridge_solution) == "gram, moment, ridge"
    promised = "labels, num_clients, scheme, seed, alpha=None"
    assert _signature(fedssl.data.partition).startswith(promised)
    assert {"model", "history", "evaluations"} <= set(fedssl.simulation.Result.__slots__)


def test_a_pulled_encoder_is_loaded_in_one_line() -> None:
    assert _signature(fedssl.models.load_encoder) == "path, client_state=None"
    assert _signature(fedssl.local.connect) == "root=.fedssl"
