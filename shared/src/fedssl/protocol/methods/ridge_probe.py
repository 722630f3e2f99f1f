"""Config of the linear probe by ridge regression on the labelled images of all sites."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.merges import OverwriteConfig
from fedssl.protocol.methods.reducers import MeanConfig
from fedssl.protocol.methods.site_labels import SiteLabelsConfig
from fedssl.protocol.model import ModelConfig


class RidgeProbeConfig(SiteLabelsConfig):
    """A linear classifier on a frozen encoder, as if all sites' labelled images were in one place."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="Linear probe by ridge regression",
        paper="Hoerl and Kennard 1970, Ridge Regression: Biased Estimation for Nonorthogonal Problems; "
        "Hastie, Tibshirani and Friedman 2009, The Elements of Statistical Learning, Section 3.4.1",
        equations="(X'X + ridge * D) W = X'Y with X = [h, 1], X'X and X'Y summed over all clients",
        leaves_the_client="in the first round X'X and X'Y of its training images; in later rounds ten counts of right "
        "predictions, the number of its held-out images, and sums of their cross-entropies at 41 scales",
        stays_on_the_client="nothing between rounds; images, labels and representations never leave",
        version=3,
    )

    averages_weights: ClassVar[bool] = False

    name: Literal["ridge-probe"] = "ridge-probe"
    min_images: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="A site with fewer labelled training images takes no part. Its policy may demand more. Null means "
        "twice the width of the representations.",
    )

    def check(self, model: ModelConfig) -> None:
        for what, given, only in (
            ("add_ons", self.add_ons, ()),
            ("merge", self.merge, OverwriteConfig()),
            ("reducer", self.reducer, MeanConfig()),
        ):
            if given != only:
                raise ValueError(f"ridge-probe trains no network: leave method.{what} out")
        super().check(model)
