"""FedU2, as in SSD's tables: FedAlignUniform with the add-on `fur` and the reducer `eua`.

Liao et al. 2024. FUR is in `flexible_uniform.py`. EUA, the reducer: with G_k = theta_g - theta_k over all parameters as
one vector, Ghat_k = 2 G_k / ||G_k|| and w the weights of the shortest convex combination of the Ghat_k,

    theta_g <- theta_g - eta_s sum_k w_k Ghat_k

with eta_s `server_learning_rate` (8). BatchNorm's statistics are means weighted by batches.

The length of a step is eta_s times at most 2, whatever the model and the clients' learning rate: 8 belongs to
FedU2's ResNet-18 at learning rate 0.048. A small model needs much less, about the length of a client's drift over 2.

Deviations: released FedU2 trains SimCLR at temperature 0.07 (`fedsimclr` with these two parts), adds a rotation task,
and evens out the clients' numbers of steps; SSD's row stands for the two components that the paper describes. The
min-norm point is exact. Others could not reproduce FedU2's published numbers from its code.
"""

from fedssl.methods.objectives.align_uniform import AlignUniform
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.fedu2 import FedU2Config

FEDU2 = composed_method(FedU2Config, AlignUniform)
