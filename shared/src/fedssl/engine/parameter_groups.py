"""Groups of parameters that share a learning rate and a weight decay."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fedssl.methods.composition.modules import encoder_layers
from fedssl.methods.composition.part import ENCODER
from fedssl.protocol.training import OptimizerConfig

_SCALE, _DECAYS = "learning_rate_scale", "decays"


def parameter_groups(modules: nn.ModuleDict, config: OptimizerConfig, factors: Mapping[str, float]) -> Iterable[Any]:
    """Return the trained parameters, in groups as torch's optimisers take them if not all are treated alike.

    With `layer_decay` d, the encoder's layer number i of n, counted from 0, has d^(n - i) times the learning rate, so
    that the last layer has d times that of the heads (the code of BEiT and MAE). Without `decay_norms_and_biases`,
    parameters of one dimension have no weight decay, as in the code of MAE and DINO. `factors`: of the learning rate of
    modules, by their names.
    """
    named = [(name, each) for name, each in modules.named_parameters() if each.requires_grad]
    if config.layer_decay == 1 and config.decay_norms_and_biases and not factors:
        return [parameter for _, parameter in named]
    scales = _layer_scales(modules, config.layer_decay)
    groups: dict[tuple[float, bool], list[torch.Tensor]] = {}
    for name, parameter in named:
        scale = next((scale for prefix, scale in scales.items() if name.startswith(prefix)), 1.0)
        scale *= factors.get(name.partition(".")[0], 1.0)
        groups.setdefault((scale, config.decay_norms_and_biases or parameter.ndim > 1), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": config.learning_rate * scale,
            "weight_decay": config.weight_decay if decays else 0.0,
            _SCALE: scale,
            _DECAYS: decays,
        }
        for (scale, decays), parameters in groups.items()
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of each group, by its scale. A rate on a device is changed in place."""
    for group in optimizer.param_groups:
        rate = learning_rate * group.get(_SCALE, 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def move_learning_rates(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Keep each group's learning rate on `device`, so that a captured step reads it there whenever it is replayed."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)


def are_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `move_learning_rates` was called."""
    return all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)


def set_rates(optimizer: torch.optim.Optimizer, learning_rate: float, weight_decay: float) -> None:
    """Set the learning rate and the weight decay of each group, by its scale and by whether it decays."""
    set_learning_rate(optimizer, learning_rate)
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay if group.get(_DECAYS, True) else 0.0


def _layer_scales(modules: nn.ModuleDict, layer_decay: float) -> dict[str, float]:
    """Return the scale of each prefix of a parameter's name that has one."""
    if layer_decay == 1:
        return {}
    layers = encoder_layers(modules)
    return {
        f"{ENCODER}.{prefix}": layer_decay ** (len(layers) - number)
        for number, prefixes in enumerate(layers)
        for prefix in prefixes
    }
