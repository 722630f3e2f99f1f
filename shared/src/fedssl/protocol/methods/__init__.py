"""Every method's config, and the union that a run's spec chooses from.

Separate from `fedssl.methods`, so that the API process can validate a spec without importing torch.
"""

from typing import Annotated, get_args

from pydantic import Field

from fedssl.protocol.methods.base import MethodConfig
from fedssl.protocol.methods.classifier import ClassifierConfig
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig
from fedssl.protocol.methods.fedbarlow import FedBarlowConfig
from fedssl.protocol.methods.fedbyol import FedBYOLConfig
from fedssl.protocol.methods.fedca import FedCAConfig
from fedssl.protocol.methods.feddecorr import FedDecorrConfig
from fedssl.protocol.methods.feddino import FedDINOConfig
from fedssl.protocol.methods.fedema import FedEMAConfig
from fedssl.protocol.methods.fedmae import FedMAEConfig
from fedssl.protocol.methods.fedmoco import FedMoCoConfig
from fedssl.protocol.methods.fedprotocl import FedProtoCLConfig
from fedssl.protocol.methods.fedprox import FedProxConfig
from fedssl.protocol.methods.fedrlc import FedRLCConfig
from fedssl.protocol.methods.fedsimclr import FedSimCLRConfig
from fedssl.protocol.methods.fedsimsiam import FedSimSiamConfig
from fedssl.protocol.methods.fedu import FedUConfig
from fedssl.protocol.methods.fedu2 import FedU2Config
from fedssl.protocol.methods.fedvicreg import FedVICRegConfig
from fedssl.protocol.methods.fedx import FedXMethodConfig
from fedssl.protocol.methods.flesd import FLESDConfig
from fedssl.protocol.methods.ldawa import LDAWAMethodConfig
from fedssl.protocol.methods.orchestra import OrchestraConfig
from fedssl.protocol.methods.ridge_probe import RidgeProbeConfig
from fedssl.protocol.methods.scaffold import ScaffoldMethodConfig
from fedssl.protocol.methods.single import SingleConfig
from fedssl.protocol.methods.ssd import SSDConfig
from fedssl.protocol.methods.supervised import SupervisedConfig

AnyMethod = Annotated[
    ClassifierConfig
    | FedAlignUniformConfig
    | FedBarlowConfig
    | FedBYOLConfig
    | FedCAConfig
    | FedDINOConfig
    | FedDecorrConfig
    | FedEMAConfig
    | FedMAEConfig
    | FedMoCoConfig
    | FedProxConfig
    | FedProtoCLConfig
    | FedRLCConfig
    | FedSimCLRConfig
    | FedSimSiamConfig
    | FedU2Config
    | FedUConfig
    | FedVICRegConfig
    | FedXMethodConfig
    | FLESDConfig
    | LDAWAMethodConfig
    | OrchestraConfig
    | RidgeProbeConfig
    | SSDConfig
    | ScaffoldMethodConfig
    | SingleConfig
    | SupervisedConfig,
    Field(discriminator="name"),
]

METHOD_CONFIGS: dict[str, type[MethodConfig]] = {
    config.model_fields["name"].default: config for config in get_args(get_args(AnyMethod)[0])
}

__all__ = ["METHOD_CONFIGS", "AnyMethod", "MethodConfig"]
