"""What every composed method's config has: one objective's own fields, add-ons, a merge rule and a reducer."""

from collections import Counter
from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.add_ons import AnyAddOn
from fedssl.protocol.methods.base import MethodConfig
from fedssl.protocol.methods.merges import AnyMerge, OverwriteConfig
from fedssl.protocol.methods.reducers import AnyReducer, MeanConfig
from fedssl.protocol.model import ModelConfig

Trait = Literal["views", "projector", "predictor", "target", "labels"]
"""What an objective has that a part may need: two views of an image; a projector; a predictor; a target network that
stays with the client; labels."""


class ComposedConfig(MethodConfig):
    """An objective's parameters, and the parts that go with it."""

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector"})

    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(), description="Loss terms and corrections on top of the objective, each at most once."
    )
    merge: AnyMerge = Field(
        default=OverwriteConfig(), description="What a client does with the global model that it receives."
    )
    reducer: AnyReducer = Field(default=MeanConfig(), description="How the coordinator combines the clients' weights.")

    def check(self, model: ModelConfig) -> None:
        counts = Counter(add_on.name for add_on in self.add_ons)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"method.add_ons names {twice[0]} twice: once is all it can do")
        for part in (*self.add_ons, self.merge, self.reducer):
            part.check(self, model)
        if "predictor" in self.traits and model.projector is None:
            raise ValueError(f"{self.name} predicts embeddings: leave model.projector out, or describe one")
