"""FedU: FedBYOL whose clients take the global predictor only where they drifted little.

Zhuang et al. 2021, Collaborative Unsupervised Visual Representation Learning from Decentralized Data. Eq. 1 and 2 are
`objectives/byol.py`'s objective (m is `target_momentum`); Eq. 3 and Table 4's ablations are its merge rule,
`merges/dapu.py`, which says where paper and code differ.
"""

from fedssl.methods.objectives.byol import BYOL
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.fedu import FedUConfig

FEDU = composed_method(FedUConfig, BYOL)
