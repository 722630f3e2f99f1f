"""From a config to a method: finds the runtime part of every config by its name."""

from collections.abc import Callable
from typing import Any, TypeVar

from fedssl.methods.add_ons.crossed_kl import CrossedKL
from fedssl.methods.add_ons.decorrelation import Decorrelation
from fedssl.methods.add_ons.dimension_separation import DimensionScaledRegularisation, HardSeparation
from fedssl.methods.add_ons.fedx import CrossDistillation
from fedssl.methods.add_ons.flexible_uniform import FlexibleUniform
from fedssl.methods.add_ons.projector_distillation import ProjectorDistillation
from fedssl.methods.add_ons.proximal import Proximal
from fedssl.methods.add_ons.scaffold import ControlVariates
from fedssl.methods.api import Method
from fedssl.methods.composition.client import ComposedClient
from fedssl.methods.composition.part import Merge, Objective, Part
from fedssl.methods.composition.server import ComposedServer, Reducer
from fedssl.methods.merges.centers import CenterMerge
from fedssl.methods.merges.client_distillation import LearnFromStudent
from fedssl.methods.merges.dapu import DivergenceAwarePredictorUpdate
from fedssl.methods.merges.ema import DivergenceAwareEMA
from fedssl.methods.merges.local import Local
from fedssl.methods.merges.overwrite import OVERWRITE
from fedssl.methods.reducers.means import eua, ldawa, mean, none
from fedssl.methods.reducers.similarity import SimilarityUpload
from fedssl.methods.reducers.similarity_distillation import distillation
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.distillation import distillation_of
from fedssl.protocol.plan import ArtifactPlan, Reduction, TensorSpec
from fedssl.protocol.runs import RunSpec

C = TypeVar("C", bound=ComposedConfig)

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
    "ldawa": ldawa,
    "mean": mean,
    "none": none,
}


def composed_method(config: type[C], objective: Callable[[C], Objective]) -> Method[C]:
    """The method whose objective is made from its config, with the parts that the config names."""

    def client(chosen: C) -> ComposedClient:
        distils = distillation_of(chosen)
        lesson = None if distils is None else distils.client_distillation
        return ComposedClient(
            host=objective(chosen),
            add_ons=tuple(ADD_ONS[add_on.name](add_on) for add_on in chosen.add_ons),
            merge_rule=MERGES[chosen.merge.name](chosen.merge),
            upload=None if distils is None else SimilarityUpload(distils),
            encoders={} if distils is None else distils.own_encoders,
            own_merge=None if distils is None or lesson is None else LearnFromStudent(distils, lesson),
        )

    return Method(
        name=config.model_fields["name"].default,
        config=config,
        artifacts=lambda chosen, spec: _reduced_by(chosen.reducer.name, client(chosen), spec),
        client=client,
        server=lambda chosen: ComposedServer(client(chosen), REDUCERS[chosen.reducer.name](chosen.reducer)),
    )


def _reduced_by(reducer: str, client: ComposedClient, spec: RunSpec) -> ArtifactPlan:
    """The plan with its tensors' reductions as the reducer has them: a weight's own is the mean."""
    plan = client.plan(spec)
    if reducer == "mean":
        return plan
    rule: Reduction = "keep" if reducer == "none" else "method"
    apart = () if reducer == "none" else tuple(f"{name}." for part in client.parts for name in part.reduced_apart)

    def ruled(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(
            tensor if tensor.name.startswith(apart) else tensor.model_copy(update={"reduce": rule})
            for tensor in tensors
        )

    return ArtifactPlan(broadcast=ruled(plan.broadcast), update=ruled(plan.update))
