"""SCAFFOLD on FedSimCLR: FedSimCLR with the add-on `scaffold`, which goes onto any other method too.

Karimireddy et al. 2020; equations, variants and deviations are in `control_variates.py`. FedX's Table 2 puts SCAFFOLD
onto local distillation: `fedx` without its global terms, with this add-on.
"""

from fedssl.methods.compose import composed_method
from fedssl.methods.fedsimclr import SimCLR
from fedssl.protocol.methods.scaffold import ScaffoldMethodConfig

SCAFFOLD = composed_method(ScaffoldMethodConfig, SimCLR)
