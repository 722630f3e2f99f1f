"""The ways in which the server combines updates: pure functions of tensors, without I/O, clocks or global random state.

Shape suffixes: N samples, D embedding width, K clients, P parameters, M centers. Updates are mappings from tensor
names to tensors, which may be loaded on access; results are in name order. Sums are computed in float64, in the order
given, and rounded once; those of `fixed_point` are computed in integers, in any order. `AggregationError`, a
ValueError, is raised if updates cannot be combined.
"""

from fedssl.aggregation.clustering import (
    Clustering,
    balanced_kmeans,
    global_centroids,
    sinkhorn_assignment,
    spherical_kmeans,
)
from fedssl.aggregation.fixed_point import OutOfRange, fixed_point_mean
from fedssl.aggregation.layerwise import is_batch_norm_buffer, layerwise_divergence_aware
from fedssl.aggregation.mean import AggregationError, weighted_mean
from fedssl.aggregation.min_norm import min_norm_weights, min_norm_weights_from_gram
from fedssl.aggregation.robust import coordinate_median, geometric_median, multi_krum, trimmed_mean
from fedssl.aggregation.server_optimizers import fedadam_step, fedavgm_step, moving_average
from fedssl.aggregation.similarity import ensemble_similarity
from fedssl.aggregation.unified import efficient_unified_aggregation
from fedssl.aggregation.weights import capped_at_median, capped_weights

__all__ = [
    "AggregationError",
    "Clustering",
    "OutOfRange",
    "balanced_kmeans",
    "capped_at_median",
    "capped_weights",
    "coordinate_median",
    "efficient_unified_aggregation",
    "ensemble_similarity",
    "fedadam_step",
    "fedavgm_step",
    "fixed_point_mean",
    "geometric_median",
    "global_centroids",
    "is_batch_norm_buffer",
    "layerwise_divergence_aware",
    "min_norm_weights",
    "min_norm_weights_from_gram",
    "moving_average",
    "multi_krum",
    "sinkhorn_assignment",
    "spherical_kmeans",
    "trimmed_mean",
    "weighted_mean",
]
