"""torch's optimisers, without the compiler that torch loads when the first one is made.

torch excludes five methods of every optimiser from compilation. The first call of such a method imports
`torch._dynamo`: 800 modules, more than a second and 70 MB in every process that trains. fedssl compiles objectives and
never optimisers, so here the methods are as they were before torch wrapped them. The mathematics is torch's.
"""

import inspect
from typing import Any, TypeVar, cast

import torch

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_EXCLUDED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def _without_compiler(kind: type[OptimizerT]) -> type[OptimizerT]:
    """Return a subclass of the same name whose methods do not load the compiler."""
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in _EXCLUDED}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return cast(type[OptimizerT], type(kind.__name__, (kind,), methods))


SGD = _without_compiler(torch.optim.SGD)
Adam = _without_compiler(torch.optim.Adam)
AdamW = _without_compiler(torch.optim.AdamW)
LBFGS = _without_compiler(torch.optim.LBFGS)
