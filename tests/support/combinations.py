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
"""Sections of specs, by the names that tests have for them."""

_VIT = {"encoder": {"name": "vit-tiny", "patch_size": 4, "depth": 2}}
_SMALL = {"encoder": {"widths": [8, 16]}, "projector": {"hidden_dims": [16], "out_dim": 8}}
_PER_STEP = {"schedule": "cosine_per_step", "warmup_rounds": 0.5, "final_weight_decay": 0.1}

FEATURES: dict[str, dict[str, Any]] = {
    "rates per step": {"method": _SIMCLR, "training": {"optimizer": _PER_STEP}},
    "lars, rates per step": {
        "method": _SIMCLR,
        "training": {"optimizer": {"name": "lars", "learning_rate": 0.5, **_PER_STEP}},
    },
    "micro-batches": {"method": {"name": "fedbyol"}, "training": {"num_micro_batches": 4}},
    "checkpointed": {"method": _SIMCLR, "training": {"gradient_checkpointing": True}},
    "vit, checkpointed": {
        "method": {"name": "fedsimsiam"},
        "model": _VIT,
        "training": {"gradient_checkpointing": True, "optimizer": {"layer_decay": 0.75}},
    },
    "lora": {"method": _SIMCLR, "model": {**_VIT, "lora": {"rank": 2, "alpha": 4}}},
    "local crops": {
        "method": {"name": "feddino", "num_prototypes": 32},
        "data": {"channels": 1, "image_size": 8, "local_crops": {"num_crops": 2, "image_size": 4}},
    },
    "recalibrated, partly frozen": {
        "method": _SIMCLR,
        "model": {**_SMALL, "batch_norm": "recalibrate", "trainable": ["blocks.1.*"]},
    },
    "own BatchNorm": {"method": _SIMCLR, "model": {**_SMALL, "batch_norm": "local"}},
    "half epochs": {"method": {**_SIMCLR, "add_ons": [{"name": "fedx"}]}, "training": {"epoch_fraction": 0.5}},
    "uploaded in half precision": {"method": _SIMCLR, "upload": {"dtype": "bfloat16"}},
}
"""Sections of specs that use one feature of the engine each, with one method, by the names that tests have for them."""

ALL_COMBINATIONS = [*TRAINED_METHODS, *COMBINATIONS]


def combined_spec(name: str, **changes: Any) -> RunSpec:
    """Return the spec of a method, a combination or a feature; `changes` replace whole sections."""
    if name in ALL_METHODS:
        return method_spec(name, **changes)
    sections = {**COMBINATIONS, **FEATURES}[name]
    return method_spec(sections["method"]["name"], **{**sections, **changes})
