"""SSD: soft separation and distillation.

Fang et al. 2025, Eq. 10: L = La + beta Lu + gamma DSR + delta PD, with beta `uniformity_weight` (1), gamma 1 and delta
0.1 in the add-ons `dsr` and `pd`. La and Lu are FedAlignUniform's (`align_uniform.py`), DSR is in `dimension_separation.py`,
next to HSD, PD is `projector_distillation.py`; each docstring names its paper and reference variants and
why the default is the reference. The coordinator averages encoder and projector, weighted by batches; a client is told
once which dimensions are its own, and keeps no state.

The tables' rows by config: DSR alone, PD alone (Table 3), PD by MSE (Table 5) and HSD are other `add_ons`; the rows
without a projector (Table 4) are FedAlignUniform, with or without dsr, on a model with projector None.

Deviations: subspaces belong to clients (SSD's code: to positions in the sample). The learning rate is the run's; SSD's
code computes a cosine and never applies it, so its tables stand for a constant 0.1.
"""

from fedssl.methods.objectives.align_uniform import AlignUniform
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.ssd import SSDConfig

SSD = composed_method(SSDConfig, AlignUniform)
