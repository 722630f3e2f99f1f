"""FedProx on FedSimCLR: FedSimCLR with the add-on `proximal`, which goes onto any other method too.

Li et al. 2020; the equation and the deviations are in `proximal.py`. FLESD's baseline searches mu among 0.001, 0.01,
0.1 and 1 without the 1/2: double those.
"""

from fedssl.methods.objectives.simclr import SimCLR
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.fedprox import FedProxConfig

FEDPROX = composed_method(FedProxConfig, SimCLR)
