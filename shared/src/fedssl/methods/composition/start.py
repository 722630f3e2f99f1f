"""The first weights of a run that starts from an existing encoder."""

from collections.abc import Iterable

from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import MethodError
from fedssl.methods.api import Context
from fedssl.methods.composition.modules import module_of
from fedssl.methods.composition.part import ENCODER, Part
from fedssl.models import Encoder, load_initial


def load_start(modules: nn.ModuleDict, parts: Iterable[Part], tensors: Tensors | None, ctx: Context) -> str:
    """Load the encoder of the spec's `model.initial` into freshly built modules, and heads if a part uses them.

    Returns what was loaded, for people: empty if the spec names no encoder. Raises SpecError if the tensors do not fit,
    and MethodError if they are missing: a run must never start from random weights unless its spec does.
    """
    config = ctx.spec.model.initial
    if config is None:
        return ""
    if tensors is None:
        raise MethodError(f"the run starts from {config.source}, and these weights were not given")
    loaded = [f"{load_initial(module_of(modules, ENCODER, Encoder), tensors, config.adapt)}"]
    loaded += [part.load_start(modules, tensors, ctx) for part in parts]
    return ", ".join(filter(None, loaded))
