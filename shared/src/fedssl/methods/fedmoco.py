"""FedMoCo: FedAvg of MoCo, in its versions 1 and 2.

He et al. 2020, Momentum Contrast, Eq. 1 and 2; Chen et al. 2020, Improved Baselines with Momentum Contrastive Learning;
federated as in EasyFL's code: query encoder and projector are averaged and overwrite the client's. The objective is
`objectives/moco.py`, which says how its symbols are named and where it differs.

`variant` "v2" is the default, as the stronger of the two: a projector of one hidden layer (EasyFL: 512-512(BN,
ReLU)-128), temperature 0.2, learning rate on a cosine. "v1": a linear projector (`model.projector.hidden_dims = []`,
width 128), temperature 0.07, constant learning rate, weaker colour jitter.

FedX, which compares with FedMoCo, gives no details but temperature 0.1; its other baselines have 256-wide embeddings.
"""

from fedssl.methods.objectives.moco import MomentumContrast
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.fedmoco import FedMoCoConfig

FEDMOCO = composed_method(FedMoCoConfig, MomentumContrast)
