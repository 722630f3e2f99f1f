"""Methods composed of parts, in addition to the named ones."""

from typing import Any

from fedssl.protocol.runs import RunSpec
from support.methods import ALL_METHODS, CONFIGS, PUBLIC, TRAINED_METHODS, method_spec

_SIMCLR = {"name": "fedsimclr"}

COMBINATIONS: dict[str, dict[str, Any]] = {
    "adam": {"method": _SIMCLR, "training": {"batch_size": 32, "optimizer": {"name": "adam", "learning_rate": 1e-3}}},
    "lars, clipped": {
        "method": _SIMCLR,
        "training": {
            "batch_size": 32,
            "optimizer": {
                "name": "lars",
                "learning_rate": 0.5,
                "decay_norms_and_biases": False,
                "layer_decay": 0.8,
                "max_gradient_norm": 0.5,
            },
        },
    },
    "fedbyol, scheduled target": {"method": {"name": "fedbyol", "target_momentum_schedule": "cosine"}},
    "hsd, pd": {
        "method": {**_SIMCLR, "add_ons": [{"name": "hsd", "variant": "mask"}, {"name": "pd", "variant": "mse"}]},
        "model": {"encoder": {"widths": [8, 16]}, "projector": {"hidden_dims": [16], "out_dim": 16}},
    },
    "dsr of the paper": {"method": {**_SIMCLR, "add_ons": [{"name": "dsr", "variant": "paper"}]}},
    "fedx on fedmoco": {"method": {"name": "fedmoco", "add_ons": [{"name": "fedx"}, {"name": "scaffold"}]}},
    "fedrlc at unit scale": {"method": {"name": "fedrlc", "add_ons": [{"name": "crossed_kl", "scale": "unit"}]}},
    "fedu of the paper": {"method": {"name": "fedu", "merge": {"name": "dapu", "distance": "paper", "mu": 1e-6}}},
    "fedema of the code": {"method": {"name": "fedema", "merge": {"name": "ema", "variant": "reference"}}},
    "orchestra, target kept": {"method": {**CONFIGS["orchestra"], "name": "orchestra", "target": "kept"}},
    "flesd, an encoder of its own": {
        "method": {
            "name": "flesd",
            "reducer": {**CONFIGS["flesd"]["reducer"], "client_encoders": {"client-1": {"widths": [4, 8]}}},
        },
        "public_data": PUBLIC,
    },
}
"""Sections of the spec, by what they are called here."""

ALL_COMBINATIONS = [*TRAINED_METHODS, *COMBINATIONS]


def combined_spec(name: str, **changes: Any) -> RunSpec:
    """A method's spec, or a combination's."""
    if name in ALL_METHODS:
        return method_spec(name, **changes)
    sections = COMBINATIONS[name]
    return method_spec(sections["method"]["name"], **{**sections, **changes})
