"""FedX as its paper runs it by default: FedSimCLR with cross knowledge distillation on.

Han et al. 2022, Eq. 2 and 6-13. The objective is `objectives/simclr.py`, the rest the add-on of
`add_ons/fedx.py`, which goes onto other objectives too:

    method = {name = "fedbyol", add_ons = [{name = "fedx"}]}

The paper's setting beside the defaults: ResNet-18, projector 512-256(ReLU)-256 without BatchNorm, SGD 0.01 with
momentum 0.9 and weight decay 1e-5, 100 rounds of 10 epochs, `batch_size` 64 (see the add-on), weak augmentation.
"""

from fedssl.methods.objectives.simclr import SimCLR
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.fedx import FedXMethodConfig

FEDX = composed_method(FedXMethodConfig, SimCLR)
