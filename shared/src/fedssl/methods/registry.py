"""Maps configs to methods: the objective, add-ons, merge rule and reducer of every config."""

import functools
from collections.abc import Callable
from typing import Any

from fedssl.methods.add_ons.crossed_kl import CrossedKL
from fedssl.methods.add_ons.decorrelation import Decorrelation
from fedssl.methods.add_ons.dimension_separation import DimensionScaledRegularisation, HardSeparation
from fedssl.methods.add_ons.fedx import CrossDistillation
from fedssl.methods.add_ons.flexible_uniform import FlexibleUniform
from fedssl.methods.add_ons.projector_distillation import ProjectorDistillation
from fedssl.methods.add_ons.proximal import Proximal
from fedssl.methods.add_ons.scaffold import ControlVariates
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.methods.composition.method import BoundMethod, Method
from fedssl.methods.composition.part import Merge, Objective, Part
from fedssl.methods.composition.server import Reducer, ServerAlgorithm
from fedssl.methods.merges.centers import CenterMerge
from fedssl.methods.merges.dapu import DivergenceAwarePredictorUpdate
from fedssl.methods.merges.ema import DivergenceAwareEMA
from fedssl.methods.merges.local import Local
from fedssl.methods.merges.overwrite import OVERWRITE
from fedssl.methods.merges.similarity_client import SimilarityClient
from fedssl.methods.objectives.align_uniform import AlignUniform
from fedssl.methods.objectives.barlow_twins import BarlowTwins
from fedssl.methods.objectives.byol import BYOL
from fedssl.methods.objectives.cross_entropy import CrossEntropy
from fedssl.methods.objectives.cross_view import CrossView
from fedssl.methods.objectives.dictionary_contrast import DictionaryContrast
from fedssl.methods.objectives.dino import DINO
from fedssl.methods.objectives.mae import MAE
from fedssl.methods.objectives.moco import MomentumContrast
from fedssl.methods.objectives.orchestra import orchestra
from fedssl.methods.objectives.protocl import ProtoCL
from fedssl.methods.objectives.ridge_probe import REDUCER as RIDGE
from fedssl.methods.objectives.ridge_probe import ProbeClient, RidgeProbe
from fedssl.methods.objectives.simclr import SimCLR
from fedssl.methods.objectives.simsiam import SimSiam
from fedssl.methods.objectives.site_classifier import ClassifierClient, site_classifier
from fedssl.methods.objectives.vicreg import VICReg
from fedssl.methods.reducers.means import eua, ldawa, mean, none
from fedssl.methods.reducers.robust import geometric, krum, median, trimmed
from fedssl.methods.reducers.similarity_distillation import distillation
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.methods.classifier import ClassifierConfig
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.distillation import distillation_of
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig
from fedssl.protocol.methods.fedbarlow import FedBarlowConfig
from fedssl.protocol.methods.fedbyol import BYOLConfig
from fedssl.protocol.methods.fedca import FedCAConfig
from fedssl.protocol.methods.feddino import FedDINOConfig
from fedssl.protocol.methods.fedmae import FedMAEConfig
from fedssl.protocol.methods.fedmoco import FedMoCoConfig
from fedssl.protocol.methods.fedprotocl import FedProtoCLConfig
from fedssl.protocol.methods.fedsimclr import FedSimCLRConfig
from fedssl.protocol.methods.fedsimsiam import FedSimSiamConfig
from fedssl.protocol.methods.fedvicreg import FedVICRegConfig
from fedssl.protocol.methods.flesd import FLESDConfig
from fedssl.protocol.methods.orchestra import OrchestraConfig
from fedssl.protocol.methods.ridge_probe import RidgeProbeConfig
from fedssl.protocol.methods.supervised import SupervisedConfig
from fedssl.protocol.runs import RunSpec

OBJECTIVES: dict[type[ComposedConfig], Callable[[Any], Objective]] = {
    BYOLConfig: BYOL,
    ClassifierConfig: site_classifier,
    FLESDConfig: CrossView,
    FedAlignUniformConfig: AlignUniform,
    FedBarlowConfig: BarlowTwins,
    FedCAConfig: DictionaryContrast,
    FedDINOConfig: DINO,
    FedMAEConfig: MAE,
    FedMoCoConfig: MomentumContrast,
    FedProtoCLConfig: ProtoCL,
    FedSimCLRConfig: SimCLR,
    FedSimSiamConfig: SimSiam,
    FedVICRegConfig: VICReg,
    OrchestraConfig: orchestra,
    RidgeProbeConfig: RidgeProbe,
    SupervisedConfig: CrossEntropy,
}
"""The objective of a config and of the presets that inherit from it."""

ADD_ONS: dict[str, Callable[[Any], Part]] = {
    "crossed_kl": CrossedKL,
    "decorrelation": Decorrelation,
    "dsr": DimensionScaledRegularisation,
    "fedx": CrossDistillation,
    "fur": FlexibleUniform,
    "hsd": HardSeparation,
    "pd": ProjectorDistillation,
    "proximal": Proximal,
    "scaffold": ControlVariates,
}

MERGES: dict[str, Callable[[Any], Merge]] = {
    "centers": CenterMerge,
    "dapu": DivergenceAwarePredictorUpdate,
    "ema": DivergenceAwareEMA,
    "local": Local,
    "overwrite": lambda config: OVERWRITE,
}

REDUCERS: dict[str, Callable[[Any], Reducer]] = {
    "distillation": distillation,
    "eua": eua,
    "geometric_median": geometric,
    "ldawa": ldawa,
    "mean": mean,
    "median": median,
    "multi_krum": krum,
    "none": none,
    "trimmed_mean": trimmed,
}


def objective_of(config: ComposedConfig) -> Objective:
    """Return the objective of a config: that of the nearest base class that has one."""
    make = next(OBJECTIVES[kind] for kind in type(config).__mro__ if kind in OBJECTIVES)
    return make(config)


def client_of(config: ComposedConfig) -> ClientAlgorithm:
    """Return what the clients do, with the parts that the config names."""
    host, merge_rule = objective_of(config), MERGES[config.merge.name](config.merge)
    add_ons = tuple(ADD_ONS[add_on.name](add_on) for add_on in config.add_ons)
    if isinstance(config, RidgeProbeConfig):
        return ProbeClient(host, merge_rule)
    if isinstance(config, ClassifierConfig):
        return ClassifierClient(host, merge_rule, add_ons)
    distils = distillation_of(config)
    if distils is None:
        return ClientAlgorithm(host, merge_rule, add_ons)
    return SimilarityClient(host, merge_rule, add_ons, config=distils)


def bind(spec: RunSpec) -> BoundMethod:
    """Return the spec's method with the spec's settings.

    It is cached: equal specs get the same object, with its plan.
    """
    return _bound(spec.model_dump_json())


@functools.lru_cache(maxsize=32)
def _bound(spec_json: str) -> BoundMethod:
    spec = RunSpec.model_validate_json(spec_json)
    config = spec.method
    assert isinstance(config, ComposedConfig), "every method's config is a composed one"
    client = client_of(config)
    reducer = RIDGE if isinstance(config, RidgeProbeConfig) else REDUCERS[config.reducer.name](config.reducer)
    return BoundMethod(spec, client, ServerAlgorithm(client, reducer, spec))


METHODS: dict[str, Method] = {name: Method(config, bind) for name, config in METHOD_CONFIGS.items()}
"""Every method that this build can train, by name."""
