"""FedRLC: FedBYOL guided by cluster centers.

Miao & Koyuncu 2024, Clustering-Guided Federated Learning of Representations. L = L_CKL + L_INS (Eq. 9): L_INS is
`objectives/byol.py`'s objective (sigma is `target_momentum`), L_CKL the add-on `add_ons/crossed_kl.py`, and the
download (Eq. 10 to 12) the merge rule `merges/centers.py`. Network and centers are averaged by n_k.

There is no public code. Not stated and taken from EasyFL: momentum 0.9 and weight decay 5e-4.
"""

from fedssl.methods.objectives.byol import BYOL
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.fedrlc import FedRLCConfig

FEDRLC = composed_method(FedRLCConfig, BYOL)
