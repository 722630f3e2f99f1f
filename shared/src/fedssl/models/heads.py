"""Projectors and predictors."""

from torch import nn

from fedssl.protocol.model import MLPConfig


def build_mlp(config: MLPConfig, in_dim: int, out_dim: int | None = None) -> nn.Sequential:
    """Return a head from (B, in_dim) to (B, out_dim): hidden layers Linear-[BatchNorm]-ReLU (or GELU), then one Linear.

    Args:
        config: widths and whether BatchNorm follows the layers.
        in_dim: width of the input.
        out_dim: width of the output; None takes `config.out_dim`.

    A linear layer that BatchNorm follows has no bias, because the normalisation would cancel it.
    """
    layers: list[nn.Module] = []
    width = in_dim
    for hidden in config.hidden_dims:
        layers.append(nn.Linear(width, hidden, bias=not config.batch_norm))
        if config.batch_norm:
            layers.append(nn.BatchNorm1d(hidden))
        layers.append(nn.ReLU() if config.activation == "relu" else nn.GELU())
        width = hidden
    last = config.out_dim if out_dim is None else out_dim
    layers.append(nn.Linear(width, last, bias=not config.out_batch_norm))
    if config.out_batch_norm:
        layers.append(nn.BatchNorm1d(last, affine=False))
    return nn.Sequential(*layers)
