"""L-DAWA, as in SSD's tables: FedAlignUniform with the reducer `ldawa`.

Rehman et al. 2023. For every tensor l of the model

    theta_g^l = 1/K sum_k min(1, cos(theta_k^l, theta_prev^l)) theta_k^l

with theta_prev the global model that was sent: no weights by images, no renormalisation, so that disagreement shrinks
a tensor. The first three rounds (`num_plain_rounds`) are plain means, all clients alike.

Deviations: BatchNorm's statistics are no directions and are averaged plainly (`batch_norm` "plain"); L-DAWA's code
scales them too ("scaled"). FedU2's port, which SSD's row may have run, takes one cosine for a whole network.
"""

from fedssl.methods.objectives.align_uniform import AlignUniform
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.ldawa import LDAWAMethodConfig

LDAWA = composed_method(LDAWAMethodConfig, AlignUniform)
