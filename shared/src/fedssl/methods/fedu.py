"""FedU: FedBYOL whose clients take the global predictor only where they drifted little.

Zhuang et al. 2021, Collaborative Unsupervised Visual Representation Learning from Decentralized Data. Eq. 1 and 2 are
`fedssl.methods.fedbyol`'s objective (m is `target_momentum`); Eq. 3 and Table 4's ablations are its merge rule,
`fedssl.methods.dapu`, which says where paper and code differ.
"""

from fedssl.methods.compose import composed_method
from fedssl.methods.fedbyol import BYOL
from fedssl.protocol.methods.fedu import FedUConfig

FEDU = composed_method(FedUConfig, BYOL)
