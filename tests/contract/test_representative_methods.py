"""The representative methods, which replace all methods in slow tests, cover every trait that a method can have."""

from collections.abc import Callable

import pytest
from torch import nn

from fedssl.methods import METHODS
from fedssl.methods.composition.method import BoundMethod
from fedssl.methods.composition.ring import Ring
from support.methods import ALL_METHODS, REPRESENTATIVE_METHODS, context, method_spec


def _modules(method: BoundMethod) -> dict[str, nn.Module]:
    return dict(method.client.build(context(method.spec, 1, "client-0")).items())


TRAITS: dict[str, Callable[[BoundMethod], bool]] = {
    "target network": lambda method: "target_encoder" in _modules(method),
    "key network": lambda method: "key_encoder" in _modules(method),
    "queue": lambda method: any(isinstance(module, Ring) for module in _modules(method).values()),
    "client state": lambda method: any(part.kept for part in method.client.parts),
    "server state": lambda method: bool(method.client.wires),
    "extra streams": lambda method: any(part.streams for part in method.client.parts),
    "add-on": lambda method: bool(method.client.add_ons),
    "own merge rule": lambda method: method.spec.method.merge.name != "overwrite",  # type: ignore[attr-defined]
    "own reducer": lambda method: method.server.reducer.declares is not None,
    "public data": lambda method: method.spec.public_data is not None,
    "training on the coordinator": lambda method: method.spec.method.distillation_epochs(1) > 0,
}


@pytest.mark.parametrize("trait", TRAITS)
def test_a_representative_method_has_the_trait_and_another_does_not(trait: str) -> None:
    having = {name for name in ALL_METHODS if TRAITS[trait](METHODS[name].bind(method_spec(name)))}
    assert having & set(REPRESENTATIVE_METHODS)
    assert having != set(ALL_METHODS)


def test_five_methods_are_representative() -> None:
    assert len(set(REPRESENTATIVE_METHODS) & set(ALL_METHODS)) == 5
