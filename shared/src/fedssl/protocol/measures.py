"""Names of the metrics that the coordinator measures of each update."""

UPDATE_NORM, CENTER_NORM = "update_norm", "update_center_norm"
"""L2 norm of update minus broadcast, over the weights and over the cluster centers that both hold."""

CONTROL_NORM = "update_control_norm"
"""L2 norm of the change of a control variate, over all its tensors."""

FEATURE_NORM = "update_feature_norm"
"""Largest L2 norm of one row of centroids, a dictionary, representations or a similarity factor; of similarities that
are sent one by one, the largest."""

COSINE = "update_cosine"
"""Cosine between (update minus broadcast) and (next broadcast minus broadcast), over the weights. With a weighted mean
as reducer, the latter is the weighted mean of the updates."""

WEIGHT_SHARE = "update_weight_share"
"""The update's share of the mean: of the round's images or batches after the bounds of `robustness`, or one over the
number of updates if the reducer's weights are equal. It is left out if the round's step is not a weighted mean of the
updates as they were sent: with other reducers, with a server optimiser, and if an update was clipped."""

NORMS = (UPDATE_NORM, CENTER_NORM, CONTROL_NORM, FEATURE_NORM)
MEASURES = (*NORMS, COSINE, WEIGHT_SHARE)
"""The names of the metrics that the coordinator measures for each client. A client may not report them itself."""
