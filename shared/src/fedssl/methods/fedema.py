"""FedEMA: FedBYOL whose clients mix the global network with their own.

Zhuang et al. 2022, Divergence-Aware Federated Self-Supervised Learning. The objective is `fedssl.methods.fedbyol`'s;
the mix is its merge rule, `fedssl.methods.ema`, which says where paper and code differ.
"""

from fedssl.methods.compose import composed_method
from fedssl.methods.fedbyol import BYOL
from fedssl.protocol.methods.fedema import FedEMAConfig

FEDEMA = composed_method(FedEMAConfig, BYOL)
