"""Every method's config, and the union that a run's spec chooses from.

Kept apart from `fedssl.methods` so that the API process can validate a spec without importing torch.
"""

from typing import Annotated

from pydantic import Field

from fedssl.protocol.methods.base import MethodConfig
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig
from fedssl.protocol.methods.fedbyol import FedBYOLConfig
from fedssl.protocol.methods.fedsimclr import FedSimCLRConfig
from fedssl.protocol.methods.supervised import SupervisedConfig

AnyMethod = Annotated[
    FedAlignUniformConfig | FedBYOLConfig | FedSimCLRConfig | SupervisedConfig, Field(discriminator="name")
]

METHOD_CONFIGS: dict[str, type[MethodConfig]] = {
    config.model_fields["name"].default: config
    for config in (FedAlignUniformConfig, FedBYOLConfig, FedSimCLRConfig, SupervisedConfig)
}

__all__ = ["METHOD_CONFIGS", "AnyMethod", "MethodConfig"]
