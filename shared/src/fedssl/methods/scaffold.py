"""SCAFFOLD on FedSimCLR: FedSimCLR with the add-on `scaffold`, which goes onto any other method too.

Karimireddy et al. 2020; equations, variants and deviations are in `add_ons/scaffold.py`. FedX's Table 2 puts SCAFFOLD
onto local distillation: `fedx` without its global terms, with this add-on.
"""

from fedssl.methods.objectives.simclr import SimCLR
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.scaffold import ScaffoldMethodConfig

SCAFFOLD = composed_method(ScaffoldMethodConfig, SimCLR)
