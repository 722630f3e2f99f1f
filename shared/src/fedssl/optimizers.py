"""torch's optimisers, without the compiler that torch loads when the first one is created.

torch excludes five methods of every optimiser from compilation. The first call of such a method imports
`torch._dynamo`: 800 modules, more than a second and 70 MB in every process that trains. fedssl compiles objectives and
never optimisers, so the methods here are the originals, before torch wrapped them. The mathematics is torch's.
"""

import inspect
from typing import Any, TypeVar, cast

import torch

LARS_TRUST = 1e-3
"""The ratio of the length of LARS's step to that of the weight, at learning rate 1 and before momentum.

It is eta of You et al. 2017.
"""

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_EXCLUDED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def _without_compiler(kind: type[OptimizerT]) -> type[OptimizerT]:
    """Return a subclass of the same name whose methods do not load the compiler."""
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in _EXCLUDED}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return cast(type[OptimizerT], type(kind.__name__, (kind,), methods))


class _LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017), as in the code of Barlow Twins and VICReg:

        u <- g + weight_decay w
        u <- trust |w| / |u| u          if w has several dimensions and neither length is 0
        v <- momentum v + u;   w <- w - lr v

    The steps of scales of normalisations and of biases, which have one dimension, are not scaled to their length. In
    that code they do not decay either, which is `decay_norms_and_biases = false` here. Each step computes only with
    tensors, so a GPU can capture it.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = LARS_TRUST
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        change = parameter.grad.add(parameter, alpha=group["weight_decay"])
        if parameter.ndim > 1:
            length, step_length = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(change)
            is_scaled = (length > 0) & (step_length > 0)
            change.mul_(torch.where(is_scaled, group["trust"] * length / step_length, torch.ones_like(length)))
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["momentum_buffer"].mul_(group["momentum"]).add_(change)
        parameter.add_(state["momentum_buffer"], alpha=-group["lr"])


class _SGD(torch.optim.SGD):
    """torch's SGD, with a momentum of zeros for each parameter from the beginning, which does not change any number.

    torch's fused kernel fails if a parameter gets its first gradient after others have had theirs (as the prototypes
    of FedDINO do).
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            if group["fused"] and group["momentum"]:
                for parameter in group["params"]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


SGD = _without_compiler(_SGD)
Adam = _without_compiler(torch.optim.Adam)
AdamW = _without_compiler(torch.optim.AdamW)
LARS = _without_compiler(_LARS)
LBFGS = _without_compiler(torch.optim.LBFGS)
