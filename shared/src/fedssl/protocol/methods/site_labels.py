"""Base of the configs of methods that train on the sites' own labels."""

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from fedssl.protocol.evaluation import MOST_CLASSES, ClassName, each_once
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait
from fedssl.protocol.model import ModelConfig

_TEN_NUMBERS = tuple(map(str, range(10)))


class SiteLabelsConfig(ComposedConfig):
    """The classes that the sites agree on, and the share of their labelled images that evaluate rather than train."""

    traits: ClassVar[frozenset[Trait]] = frozenset({"labels"})

    classes: Annotated[tuple[ClassName, ...], Field(min_length=2, max_length=MOST_CLASSES)] = Field(
        default=_TEN_NUMBERS,
        description="The names of the classes that the federation agrees on. A site need not have all of them.",
    )
    multi_label: bool = Field(default=False, description="Whether an image may have several labels, or none of them.")
    test_share: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="Share of a site's labelled images that are not trained on but evaluate the classifier, drawn by "
        "the seed and by group. A site's own split takes precedence.",
    )

    def check(self, model: ModelConfig) -> None:
        if model.batch_norm != "average":
            raise ValueError(
                f"{self.name} trains one classifier for all sites, on representations of one encoder: leave "
                "model.batch_norm out"
            )
        super().check(model)

    @property
    def has_personal_heads(self) -> bool:
        """Return whether each site also trains a classifier of its own."""
        return False

    @field_validator("classes")
    @classmethod
    def _each_class_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return each_once("method.classes", "class", value)
