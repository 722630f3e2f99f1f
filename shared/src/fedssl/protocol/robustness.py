"""A run's limits on updates that would move the global model too far at once, or that claim too many images."""

from typing import Any, Literal

from pydantic import Field

from fedssl.protocol.base import StrictModel


def _is_none(value: object) -> bool:
    return value is None


def _limit(description: str, **bounds: Any) -> Any:
    return Field(default=None, gt=0, description=description, exclude_if=_is_none, **bounds)


class RobustnessConfig(StrictModel):
    """Bounds what one client's update can do in one round. Off by default, except that an update that is not finite, or
    lies beyond every possible training (1e18), is always rejected.

    A bound limits what one client can do in one round, and reports which one tried. It cannot judge an update
    otherwise. Each kind of tensor has its own bound, because their scales differ.
    """

    max_update_norm: float | None = Field(
        default=None,
        gt=0,
        description="Largest L2 norm of update minus broadcast, over all floating-point weights that both hold. Null: "
        "no limit.",
    )
    max_center_norm: float | None = _limit(
        "Largest L2 norm of update minus broadcast, over the cluster centers (FedRLC). Null: no limit."
    )
    max_control_norm: float | None = _limit(
        "Largest L2 norm of the change of a client's control variate (SCAFFOLD), over all its tensors. Null: no limit."
    )
    max_feature_norm: float | None = _limit(
        "Largest L2 norm of one row of centroids (Orchestra), a dictionary (FedCA), representations or a similarity "
        "factor (FLESD). An honest row has length 1, up to rounding: 1.01 is a sensible bound. Null: no limit."
    )
    max_weight_share: float | None = _limit(
        "Largest share of one client's update in a weighted mean; the excess is divided among the others in "
        "proportion to their weights. With fewer clients than 1 / max_weight_share, all count equally. Null: no limit.",
        le=1,
    )
    max_examples: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        exclude_if=_is_none,
        description="Largest number of images with which one client's update counts. In a secure round each client "
        "applies it, and a sum whose weights are more than all clients may have together is not used. Null: no limit.",
    )
    max_examples_ratio: float | None = Field(
        default=None,
        ge=1,
        le=1e6,
        exclude_if=_is_none,
        description="Largest number of images with which one client's update counts, as a multiple of the median "
        "over the round's updates. Null: no limit.",
    )
    action: Literal["clip", "reject"] = Field(
        default="clip",
        description="If a norm is larger, `clip` scales the difference (or the row) down to it, and `reject` "
        "leaves the update out.",
    )

    @property
    def has_norm_bound(self) -> bool:
        """True if any norm of an update is bounded."""
        bounds = (self.max_update_norm, self.max_center_norm, self.max_control_norm, self.max_feature_norm)
        return any(bound is not None for bound in bounds)
