"""Encoders that split their batches among several devices."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fedssl.data_parallel import SplitBatchNorm2d
from fedssl.errors import MethodError
from fedssl.methods.composition.splitting import split_encoders
from fedssl.models import Encoder
from support.methods import method_spec
from support.rounds import training


def test_split_encoders_keep_their_tensors_and_copies_are_independent() -> None:
    client = training(method_spec("fedbyol"))
    before = {name: tensor.clone() for name, tensor in client.modules.state_dict().items()}
    x = client.batch().views[0]
    expected = client.modules["encoder"].eval()(x)
    split_encoders(client.modules)
    split_encoders(client.modules)  # a second call has no effect
    norms = [module for module in client.modules["encoder"].modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert all(type(module) is SplitBatchNorm2d for module in norms)
    assert type(client.modules["target_encoder"]) is type(client.modules["encoder"])
    assert client.modules.state_dict().keys() == before.keys()
    twin = copy.deepcopy(client.modules["encoder"])
    for parameter in client.modules["encoder"].parameters():
        parameter.data.zero_()
    assert torch.equal(twin(x), expected)


class _Odd(Encoder):
    feature_dim = 3

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.mean(dim=(2, 3)))
        return normed


def test_other_batch_normalisations_are_refused_with_the_name_of_the_layer() -> None:
    with pytest.raises(MethodError, match=r"the encoder's norm is a BatchNorm1d, .* without --gpus"):
        split_encoders(nn.ModuleDict({"encoder": _Odd(nn.BatchNorm1d(3))}))
    split_encoders(nn.ModuleDict({"encoder": _Odd(nn.LayerNorm(3))}))
