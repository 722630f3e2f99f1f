"""FedEMA: FedBYOL whose clients mix the global network with their own.

Zhuang et al. 2022, Divergence-Aware Federated Self-Supervised Learning. The objective is `objectives/byol.py`'s;
the mix is its merge rule, `merges/ema.py`, which says where paper and code differ.
"""

from fedssl.methods.objectives.byol import BYOL
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.fedema import FedEMAConfig

FEDEMA = composed_method(FedEMAConfig, BYOL)
