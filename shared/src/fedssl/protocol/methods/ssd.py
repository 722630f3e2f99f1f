"""SSD: soft separation and distillation.

Fang et al. 2025, Eq. 10: L = La + beta Lu + gamma DSR + delta PD, with beta `uniformity_weight` (1), gamma 1 and delta
0.1 in the add-ons `dsr` and `pd`. La and Lu are FedAlignUniform's. DSR and its hard counterpart HSD are in the module
`add_ons.dimension_separation`, PD is in `add_ons.projector_distillation`; each docstring names its paper and reference
variants and why the default is the reference. The coordinator averages encoder and projector, weighted by batches. A
client is assigned its dimensions once, and keeps no state.

The rows of the tables by config: only DSR, only PD (Table 3), PD by MSE (Table 5) and HSD are other `add_ons`; the
rows without a projector (Table 4) are FedAlignUniform, with or without `dsr`, on a model whose projector is None.

Deviations: subspaces belong to clients (SSD's code: to positions in the sample). The learning rate is the run's; SSD's
code computes a cosine and never applies it, so its tables stand for a constant 0.1.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.add_ons import AnyAddOn, DSRConfig, PDConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig
from fedssl.protocol.methods.reducers import AnyReducer, MeanConfig


class SSDConfig(FedAlignUniformConfig):
    """FedAlignUniform with soft separation (DSR) and projector distillation (PD)."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="SSD",
        paper="Fang et al. 2025, Soft Separation and Distillation: Toward Global Uniformity in Federated Unsupervised "
        "Learning",
        equations="Eq. 3, 4, 6, 7, 9 and 10",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds; its dimensions are stored with the run",
    )

    name: Literal["ssd"] = "ssd"  # type: ignore[assignment]
    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(DSRConfig(), PDConfig()),
        description="DSR and PD. Leave one out for Table 3, set pd's variant to mse for Table 5, or use hsd in place "
        "of dsr for hard separation. PD needs model.projector.out_dim to be the representation's width.",
    )
    reducer: AnyReducer = Field(
        default=MeanConfig(weighting="batches"), description="SSD's code weights by batches of an epoch."
    )
