"""Losses as pure functions of tensors, one module per family.

Shape suffixes: B batch, N samples or patches, D embedding width, H representation width, M centers (or keys), Q queue,
R references, J tangent points, P projections, prototypes or a patch's pixels, V views. Every loss takes un-normalised
embeddings and normalises them itself if the method does. It returns a scalar averaged over the batch, computes in at
least float32 (float64 stays float64) whatever the dtype of its inputs and whether or not autocast is on, and never
waits for the device. The docstring names the inputs that get no gradient, such as targets. The unit vector of a row of
zero length is zero, and the row gets no gradient, never a NaN.

If a paper and its authors' code differ, `variant="paper"` is the equation as printed and `variant="reference"` the
code.
"""

from fedssl.losses.alignment import alignment, uniformity
from fedssl.losses.assignments import (
    assignment_divergence,
    cluster_assignment,
    crossed_kl,
    student_t_assignment,
    target_distribution,
)
from fedssl.losses.contrastive import (
    cross_model_contrast,
    cross_view_info_nce,
    info_nce,
    multi_crop_nt_xent,
    nt_xent,
)
from fedssl.losses.distillation import projector_distillation, similarity_distillation
from fedssl.losses.predictive import byol_regression, negative_cosine
from fedssl.losses.prototypes import prototype_concentrations, prototype_contrast
from fedssl.losses.reconstruction import masked_reconstruction
from fedssl.losses.redundancy import barlow_twins, vicreg
from fedssl.losses.regularisation import decorrelation, proximal
from fedssl.losses.relational import relational_divergence
from fedssl.losses.self_distillation import dino, dino_center
from fedssl.losses.subspace import dimension_scaled
from fedssl.losses.tangent import flexible_uniform_regularizer, tangent_sliced_wasserstein

__all__ = [
    "alignment",
    "assignment_divergence",
    "barlow_twins",
    "byol_regression",
    "cluster_assignment",
    "cross_model_contrast",
    "cross_view_info_nce",
    "crossed_kl",
    "decorrelation",
    "dimension_scaled",
    "dino",
    "dino_center",
    "flexible_uniform_regularizer",
    "info_nce",
    "masked_reconstruction",
    "multi_crop_nt_xent",
    "negative_cosine",
    "nt_xent",
    "projector_distillation",
    "prototype_concentrations",
    "prototype_contrast",
    "proximal",
    "relational_divergence",
    "similarity_distillation",
    "student_t_assignment",
    "tangent_sliced_wasserstein",
    "target_distribution",
    "uniformity",
    "vicreg",
]
