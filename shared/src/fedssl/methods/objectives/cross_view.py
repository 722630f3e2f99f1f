"""FLESD: clients train by themselves and send similarities of public images; the coordinator distils them.

Shi et al. 2021, Towards Communication-Efficient and Privacy-Preserving Federated Representation Learning. Locally

    L = mean_i -log [ exp(cos(z_i, z_i+) / tau) / sum_j exp(cos(z_i, z_j+) / tau) ]                     (Eq. 3)

as in the authors' code: the embeddings of one view are the anchors, those of the other the positive and the B - 1
negatives.
tau is `temperature`. `reducers/similarity.py` computes what leaves, and the reducer
`reducers/similarity_distillation.py` uses it; both go onto other objectives too. Clients whose encoder is not the
model's (`reducer.client_encoders`) keep their own network and may learn from the student:
`merges/client_distillation.py`.

The paper's setting besides the defaults: ResNet-18, projector 512(ReLU)-128 without BatchNorm, Adam 1e-3 with weight
decay 1e-6, batches of 1024 without drop_last, 200 local epochs in all, T = 1 to 40 rounds. The public images are client
0's, which does not train: `simulate(public=...)`, or an .npz file of them.

The paper does not specify how the two views pass the network: `views` "joint", the default, is one pass; "separate" is
its code.

- FLESD-cc, "constant communication", is this method with `num_rounds` 1 and all epochs in it.
- FLESD's FedAvg is this objective with the reducer mean, weighted uniform; its FedProx has the add-on proximal too.
- Min-Local is the merge rule `local` and the reducer `none` on this objective, the worst client's accuracy.
"""

from dataclasses import dataclass

from torch import nn

from fedssl.losses import cross_view_info_nce
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.part import Objective, Online
from fedssl.protocol.methods.flesd import FLESDConfig


@dataclass(frozen=True)
class CrossView(Objective):
    """Each anchor of one view against all images of the other."""

    config: FLESDConfig

    def is_joint(self) -> bool:
        return self.config.views == "joint"

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        z1, z2 = online.z
        return {"contrastive": cross_view_info_nce(z1, z2, self.config.temperature)}, {}
