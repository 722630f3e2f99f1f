"""The run of each golden curve: one per method, and others for parts and variants that no method has by default.

Everything is plain data that `RunSpec` reads, so that a curve depends on nothing but the public interface.
"""

from typing import Any

from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.runs import RunSpec

NUM_ROUNDS = 3
PUBLIC = {"dataset": "digits", "split": "test", "num_images": 48}
WIDE_PROJECTOR = {"encoder": {"widths": [4, 8]}, "projector": {"hidden_dims": [12], "out_dim": 8}}
DISTILLATION = {
    "name": "distillation",
    "num_epochs": 3,
    "batch_size": 16,
    "num_anchors": 32,
    "momentum": 0.9,
    "optimizer": {"name": "adam", "learning_rate": 3e-3},
}

# What a method needs beyond its defaults so that each of its rules acts within three rounds; keyed by method.
METHODS: dict[str, dict[str, Any]] = {
    "fedca": {
        "method": {"dictionary_size": 64, "client_dictionary_size": 24, "num_base_epochs": 3},
        "public_data": PUBLIC,
    },
    "fedmoco": {"method": {"queue_size": 24}},
    "fedprotocl": {"method": {"queue_size": 24, "images_per_cluster": [20, 10], "num_kmeans_iterations": 5}},
    "fedu2": {"method": {"reducer": {"name": "eua", "server_learning_rate": 0.3}}},
    "flesd": {"method": {"reducer": DISTILLATION}, "public_data": PUBLIC},
    "ldawa": {"method": {"reducer": {"name": "ldawa", "num_plain_rounds": 1}}},
    "orchestra": {
        "method": {"num_global_centroids": 8, "num_local_centroids": 4, "memory_size": 24, "num_global_steps": 20}
    },
    "ssd": {"model": WIDE_PROJECTOR},
}

_SIMCLR = {"name": "fedsimclr"}

# Other runs, keyed by the name of their curve.
OTHERS: dict[str, dict[str, Any]] = {
    "adamw-cosine": {
        "method": _SIMCLR,
        "training": {"optimizer": {"name": "adamw", "learning_rate": 1e-3, "schedule": "cosine"}, "drop_last": False},
    },
    "augmentations": {
        "method": {"name": "fedalignuniform", "views": "separate"},
        "data": {
            "channels": 3,
            "mean": [0.4, 0.5, 0.6],
            "std": [0.2, 0.25, 0.3],
            "augmentation": {
                "crop": "padded",
                "padding": 2,
                "padding_mode": "reflect",
                "blur": 0.5,
                "solarize": 0.3,
                "rotation_degrees": 20,
            },
        },
        "evaluation": {"dataset": "digits", "measures": ["geometry"], "every": 1, "max_train": 40, "max_test": 40},
    },
    "bounded-updates": {"method": _SIMCLR, "robustness": {"max_update_norm": 0.12, "action": "clip"}},
    "decorrelation-of-supervised-representations": {
        "method": {"name": "supervised", "add_ons": [{"name": "decorrelation", "on": "h", "variant": "paper"}]}
    },
    "dsr-pd-of-the-papers": {
        "method": {
            **_SIMCLR,
            "add_ons": [{"name": "dsr", "variant": "paper", "gamma": 0.02}, {"name": "pd", "variant": "paper"}],
        },
        "model": WIDE_PROJECTOR,
    },
    "fedema-of-its-code-late-joiner": {
        "method": {"name": "fedema", "merge": {"name": "ema", "variant": "reference", "cap": 0.7}},
        "cohort": {"fraction": 0.67},
        "seed": 0,  # its cohorts are {1, 2}, {1, 2}, {0, 1}
    },
    "fedmoco-v1-fedx-scaffold": {
        "method": {
            "name": "fedmoco",
            "variant": "v1",
            "queue_size": 24,
            "add_ons": [{"name": "fedx", "rel_kl": "paper"}, {"name": "scaffold", "step_size": "plain"}],
        },
        "model": {"projector": {"hidden_dims": [], "out_dim": 8}},
    },
    "fedrlc-unit-scale-global-centers": {
        "method": {
            "name": "fedrlc",
            "add_ons": [{"name": "crossed_kl", "scale": "unit"}, {"name": "proximal", "mu": 0.1}],
            "merge": {"name": "centers", "centers": "global"},
        }
    },
    "fedu-of-the-paper-targets": {
        "method": {
            "name": "fedu",
            "merge": {"name": "dapu", "distance": "paper", "mu": 0.05, "aggregate": "target", "update": "both"},
        }
    },
    "flesd-own-encoder": {
        "method": {
            "name": "flesd",
            "views": "separate",
            "reducer": {
                **DISTILLATION,
                "packing": "triangle-i8",
                "client_encoders": {"client-1": {"widths": [4, 6]}},
                "client_distillation": {"num_epochs": 3},
            },
        },
        "public_data": PUBLIC,
    },
    "hsd-pd-mse": {
        "method": {**_SIMCLR, "add_ons": [{"name": "hsd"}, {"name": "pd", "variant": "mse"}]},
        "model": WIDE_PROJECTOR,
    },
    "local-simsiam": {"method": {"name": "fedsimsiam", "merge": {"name": "local"}, "reducer": {"name": "none"}}},
    "orchestra-target-kept": {
        "method": {
            **METHODS["orchestra"]["method"],
            "name": "orchestra",
            "target": "kept",
            "clustering_round": False,
            "reducer": {"name": "mean", "weighting": "uniform"},
        }
    },
    "resnet18-fedu": {
        "method": {"name": "fedu"},
        "model": {"encoder": {"name": "resnet18"}},
        "training": {"local_epochs": 1, "optimizer": {"learning_rate": 1e-3}},
        "partition": {"num_clients": 2, "scheme": "iid", "max_images": 32},
        "cohort": {"min_clients": 2},
    },
}

CURVES = sorted([*METHOD_CONFIGS, *OTHERS])

_BASE: dict[str, Any] = {
    "seed": 11,
    "num_rounds": NUM_ROUNDS,
    "model": {
        "encoder": {"widths": [4, 8]},
        "projector": {"hidden_dims": [12], "out_dim": 6},
        "predictor": {"hidden_dims": [12], "out_dim": 6},
    },
    "data": {"channels": 1, "image_size": 8},
    # So small a rate that a processor's rounding stays one: at a larger one some methods amplify it.
    "training": {"batch_size": 16, "local_epochs": 2, "optimizer": {"learning_rate": 0.01}},
    "cohort": {"min_clients": 3},
    "partition": {"dataset": "digits", "num_clients": 3, "alpha": 0.5, "max_images": 120},
}


def spec_of(curve: str) -> RunSpec:
    """Return the run that draws this curve."""
    if curve in OTHERS:
        return RunSpec.model_validate(_updated(_BASE, OTHERS[curve]))
    sections = METHODS.get(curve, {})
    return RunSpec.model_validate(
        _updated(_BASE, {**sections, "method": {"name": curve, **sections.get("method", {})}})
    )


def _updated(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`, table by table. A parts list and `model.projector` replace what was there."""
    merged = dict(base)
    for key, value in changes.items():
        both_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _updated(base[key], value) if both_tables else value
    return merged
