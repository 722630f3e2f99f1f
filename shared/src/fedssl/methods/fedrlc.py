"""FedRLC: FedBYOL guided by cluster centers.

Miao & Koyuncu 2024, Clustering-Guided Federated Learning of Representations. L = L_CKL + L_INS (Eq. 9): L_INS is
`fedssl.methods.fedbyol`'s objective (sigma is `target_momentum`), L_CKL the add-on `fedssl.methods.crossed_kl`, and the
download (Eq. 10 to 12) the merge rule `fedssl.methods.center_merge`. Network and centers are averaged by n_k.

There is no public code. Not stated and taken from EasyFL: momentum 0.9 and weight decay 5e-4.
"""

from fedssl.methods.compose import composed_method
from fedssl.methods.fedbyol import BYOL
from fedssl.protocol.methods.fedrlc import FedRLCConfig

FEDRLC = composed_method(FedRLCConfig, BYOL)
