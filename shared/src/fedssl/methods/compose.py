"""From a config to a method: finds the runtime part of every config by its name."""

from collections.abc import Callable
from typing import Any, TypeVar

from fedssl.methods.api import Method
from fedssl.methods.composition import OVERWRITE, ComposedClient, ComposedServer, Reducer
from fedssl.methods.parts import Merge, Objective, Part
from fedssl.methods.proximal import Proximal
from fedssl.methods.reducers import mean
from fedssl.protocol.methods.composed import ComposedConfig

C = TypeVar("C", bound=ComposedConfig)

ADD_ONS: dict[str, Callable[[Any], Part]] = {"proximal": Proximal}

MERGES: dict[str, Callable[[Any], Merge]] = {"overwrite": lambda config: OVERWRITE}

REDUCERS: dict[str, Callable[[Any], Reducer]] = {"mean": mean}


def composed_method(config: type[C], objective: Callable[[C], Objective]) -> Method[C]:
    """The method whose objective is made from its config, with the parts that the config names."""

    def client(chosen: C) -> ComposedClient:
        return ComposedClient(
            host=objective(chosen),
            add_ons=tuple(ADD_ONS[add_on.name](add_on) for add_on in chosen.add_ons),
            merge_rule=MERGES[chosen.merge.name](chosen.merge),
        )

    return Method(
        name=config.model_fields["name"].default,
        config=config,
        artifacts=lambda chosen, spec: client(chosen).plan(spec),
        client=client,
        server=lambda chosen: ComposedServer(client(chosen), REDUCERS[chosen.reducer.name](chosen.reducer)),
    )
