"""Config of the linear probe by ridge regression on the labelled images of all sites."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from fedssl.protocol.evaluation import MOST_CLASSES, ClassName
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.merges import OverwriteConfig
from fedssl.protocol.methods.parts import Trait
from fedssl.protocol.methods.reducers import MeanConfig
from fedssl.protocol.model import ModelConfig

_TEN_NUMBERS = tuple(map(str, range(10)))


class RidgeProbeConfig(ComposedConfig):
    """A linear classifier on a frozen encoder, as if all sites' labelled images were in one place."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="Linear probe by ridge regression",
        paper="Hoerl and Kennard 1970, Ridge Regression: Biased Estimation for Nonorthogonal Problems; "
        "Hastie, Tibshirani and Friedman 2009, The Elements of Statistical Learning, Section 3.4.1",
        equations="(X'X + ridge * D) W = X'Y with X = [h, 1], X'X and X'Y summed over all clients",
        leaves_the_client="in the first round X'X and X'Y of its training images; in later rounds ten counts of right "
        "predictions, the number of its held-out images, and sums of their cross-entropies at 41 scales",
        stays_on_the_client="nothing between rounds; images, labels and representations never leave",
        version=2,
    )

    traits: ClassVar[frozenset[Trait]] = frozenset({"labels"})

    objective_not_summed: ClassVar[str | None] = "ridge-probe adds its sums in float64, not in fixed point"

    name: Literal["ridge-probe"] = "ridge-probe"
    classes: Annotated[tuple[ClassName, ...], Field(min_length=2, max_length=MOST_CLASSES)] = Field(
        default=_TEN_NUMBERS,
        description="The names of the classes that the federation agrees on. A site need not have all of them.",
    )
    multi_label: bool = Field(default=False, description="Whether an image may have several labels, or none of them.")
    test_share: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="Share of a site's labelled images that choose the penalty, drawn by the seed and by group. They "
        "are in no sum. A site's own split takes precedence.",
    )
    min_images: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="A site with fewer labelled training images takes no part. Its policy may demand more. Null means "
        "twice the width of the representations.",
    )

    @field_validator("classes")
    @classmethod
    def _each_class_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("method.classes names a class twice")
        return value

    def check(self, model: ModelConfig) -> None:
        for what, given, only in (
            ("add_ons", self.add_ons, ()),
            ("merge", self.merge, OverwriteConfig()),
            ("reducer", self.reducer, MeanConfig()),
        ):
            if given != only:
                raise ValueError(f"ridge-probe trains no network: leave method.{what} out")
        super().check(model)
