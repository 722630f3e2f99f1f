"""Weights that depend only on a seed, and networks without weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound=nn.Module)


def initialised(build: Callable[[], M], seed: int) -> M:
    """Run `build` with torch's CPU generator seeded to `seed`, and restore the generator's state afterwards.

    torch's initialisers only draw from the global generator. No other thread may draw from it during the call. `build`
    must create its modules on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would seed the generators of the accelerators too, which are not forked here.
        torch.default_generator.manual_seed(seed)
        return build()


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Build networks without memory and without initial values: only names, shapes and types are known.

    torch's initialisers compute nothing on this device, and yet take three quarters of the time of a build.
    The first `randn`, `normalize` or `zeros_like` on it would also import sympy, which takes seconds.
    """
    with torch.device("meta"), _WithoutInitialisers():
        yield


_IN_THE_SAME_SHAPE = (torch.Tensor.normal_, torch.Tensor.uniform_, F.normalize)


class _WithoutInitialisers(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IN_THE_SAME_SHAPE or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        if func in (torch.randn, torch.rand):
            return torch.empty(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
        if func is torch.zeros_like and not kwargs:
            return torch.empty(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)
