"""The run of each golden curve: one per method, and others for parts and variants that no method has by default.

Everything is plain data that `RunSpec` reads, so that a curve depends on nothing but the public interface.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.runs import RunSpec

NUM_ROUNDS = 3
GREYS, COLOURS = "greys.npz", "colours.npz"
PUBLIC = {"dataset": GREYS, "split": "test", "num_images": 48}
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
    "classifier": {"method": {"classes": ["0", "1", "2", "3"]}},
    "fedca": {
        "method": {"dictionary_size": 64, "client_dictionary_size": 24, "num_base_epochs": 3},
        "public_data": PUBLIC,
    },
    "feddino": {"method": {"num_prototypes": 16, "temperature_warmup_rounds": 2}},
    "fedmae": {
        "method": {"mask_ratio": 0.5, "decoder_width": 16, "decoder_depth": 1},
        "model": {"encoder": {"name": "vit-tiny", "patch_size": 4, "depth": 2}},
        "training": {"optimizer": {"learning_rate": 0.01}},  # Adam turns rounding into steps
    },
    "fedmoco": {"method": {"queue_size": 24}},
    "fedprotocl": {"method": {"queue_size": 24, "images_per_cluster": [20, 10], "num_kmeans_iterations": 5}},
    "fedu": {"method": {"merge": {"name": "dapu", "mu": 0.008}}},
    "fedu2": {"method": {"reducer": {"name": "eua", "server_learning_rate": 0.3}}},
    "flesd": {"method": {"reducer": DISTILLATION}, "public_data": PUBLIC},
    "ldawa": {"method": {"reducer": {"name": "ldawa", "num_plain_rounds": 1}}},
    "orchestra": {
        "method": {"num_global_centroids": 8, "num_local_centroids": 4, "memory_size": 24, "num_global_steps": 20}
    },
    "ridge-probe": {"method": {"classes": ["0", "1", "2", "3"], "min_images": 8}},
    "ssd": {"model": WIDE_PROJECTOR},
}

_SIMCLR = {"name": "fedsimclr"}
_CROPS = {
    "second_view": {"solarize": 0.5},
    "local_crops": {"num_crops": 2, "image_size": 4, "min_scale": 0.1, "max_scale": 0.4},
}

# Other runs, keyed by the name of their curve.
OTHERS: dict[str, dict[str, Any]] = {
    "adamw-cosine": {
        "method": _SIMCLR,
        "training": {"optimizer": {"name": "adamw", "learning_rate": 1e-3, "schedule": "cosine"}, "drop_last": False},
    },
    "adamw-per-step-micro-batches-scheduled-target": {
        "method": {"name": "fedbyol", "target_momentum": 0.9, "target_momentum_schedule": "cosine"},
        "training": {
            "num_micro_batches": 2,
            "optimizer": {
                "name": "adamw",
                "learning_rate": 1e-3,
                "weight_decay": 0.04,
                "schedule": "cosine_per_step",
                "warmup_rounds": 0.5,
                "final_learning_rate": 1e-5,
                "final_weight_decay": 0.4,
                "decay_norms_and_biases": False,
                "layer_decay": 0.75,
            },
        },
    },
    "crops-byol": {"method": {"name": "fedbyol"}, "data": _CROPS},
    "crops-dino": {"method": {"name": "feddino", "num_prototypes": 16}, "data": _CROPS},
    "crops-moco": {"method": {"name": "fedmoco", "queue_size": 24}, "data": _CROPS},
    "crops-simclr-checkpointed": {
        "method": _SIMCLR,
        "data": _CROPS,
        "training": {"gradient_checkpointing": True},
    },
    "lars-clipped": {
        "method": _SIMCLR,
        "training": {"optimizer": {"name": "lars", "learning_rate": 0.1, "max_gradient_norm": 0.5}},
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
        "partition": {"dataset": COLOURS},
        "evaluation": {"dataset": COLOURS, "measures": ["geometry"], "every": 1},
    },
    "augmentation-microscopy": {
        "method": _SIMCLR,
        "data": {"channels": 3, "augmentation": {"preset": "microscopy"}},
        "partition": {"dataset": COLOURS},
    },
    "augmentation-none": {"method": {"name": "fedbyol"}, "data": {"augmentation": {"preset": "none"}}},
    "augmentation-radiograph": {
        "method": _SIMCLR,
        "data": {"augmentation": {"preset": "radiograph"}, "window": {"values": [0, 200]}},
    },
    "batch-norm-local-bfloat16-uploads": {
        "method": _SIMCLR,
        "model": {"batch_norm": "local"},
        "upload": {"dtype": "bfloat16"},
    },
    "batch-norm-recalibrated-trainable-averaged": {
        "method": {"name": "fedbyol"},
        "model": {"batch_norm": "recalibrate", "trainable": ["blocks.1.*"]},
        "aggregation": {"encoder_average": {"decay": 0.5}},
    },
    "bounded-updates": {"method": _SIMCLR, "robustness": {"max_update_norm": 1.5, "action": "clip"}},
    "classifier-fine-tuned": {
        "method": {
            "name": "classifier",
            "classes": ["0", "1", "2", "3"],
            "encoder_learning_rate": 1e-4,
            "add_ons": [{"name": "proximal"}],
        }
    },
    "convnext-simclr": {
        "method": _SIMCLR,
        "model": {"encoder": {"name": "convnext-tiny"}},
        "data": {"image_size": 32},
        "training": {"local_epochs": 1, "optimizer": {"learning_rate": 1e-4}},
        "partition": {
            "num_clients": 1,
            "scheme": "iid",
            "max_images": 16,
        },  # one client, because 28 million weights take time
        "cohort": {"min_clients": 1},
    },
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
    "fedbyol-fedx-of-the-paper": {
        "method": {
            "name": "fedbyol",
            "add_ons": [{"name": "fedx", "rel_kl": "paper", "variant": "paper", "relational": "predictions"}],
        }
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
            "merge": {"name": "dapu", "distance": "paper", "mu": 5e-4, "aggregate": "target", "update": "both"},
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
        "method": {**_SIMCLR, "add_ons": [{"name": "hsd", "variant": "mask"}, {"name": "pd", "variant": "mse"}]},
        "model": WIDE_PROJECTOR,
    },
    "hsd-projection": {
        "method": {**_SIMCLR, "add_ons": [{"name": "hsd", "variant": "projection"}]},
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
    "robust-geometric-median": {
        "method": {**_SIMCLR, "reducer": {"name": "geometric_median", "num_iterations": 4}},
        "cohort": {"min_updates": 3},
        "robustness": {"max_examples_ratio": 1.2},
    },
    "robust-median": {"method": {**_SIMCLR, "reducer": {"name": "median"}}, "cohort": {"min_updates": 3}},
    "robust-multi-krum": {
        "method": {**_SIMCLR, "reducer": {"name": "multi_krum", "num_selected": 3}},
        "cohort": {"min_clients": 5, "min_updates": 5},
        "partition": {"num_clients": 5, "scheme": "iid"},
    },
    "robust-trimmed-mean": {"method": {**_SIMCLR, "reducer": {"name": "trimmed_mean"}}, "cohort": {"min_updates": 3}},
    "layer-norm-fedema": {
        "method": {"name": "fedema"},
        "model": {"encoder": {"widths": [4, 6], "norm": "layer"}},
    },
    "group-norm-fedema-ldawa": {
        "method": {"name": "fedema", "merge": {"name": "ema", "variant": "reference"}, "reducer": {"name": "ldawa"}},
        "model": {"encoder": {"widths": [4, 6], "norm": "group"}},
    },
    "vit-simclr-ldawa": {
        "method": {**_SIMCLR, "reducer": {"name": "ldawa", "num_plain_rounds": 1}},
        "model": {"encoder": {"name": "vit-tiny", "patch_size": 4, "pooling": "mean", "depth": 2}},
        "training": {"optimizer": {"learning_rate": 0.01}},
    },
    "vit-lora": {
        "method": _SIMCLR,
        "model": {"encoder": {"name": "vit-tiny", "patch_size": 4, "depth": 2}, "lora": {"rank": 2, "alpha": 4}},
        "training": {"optimizer": {"learning_rate": 1e-3}},
    },
    "vicreg-of-the-paper-fedx": {
        "method": {
            "name": "fedvicreg",
            "variant": "paper",
            "invariance_weight": 1.0,
            "variance_weight": 2.0,
            "covariance_weight": 0.5,
            "add_ons": [{"name": "fedx"}],
        }
    },
    "resnet18-simsiam-dapu": {
        "method": {"name": "fedsimsiam", "merge": {"name": "dapu"}},
        "model": {"encoder": {"name": "resnet18"}},
        "training": {"local_epochs": 1, "optimizer": {"learning_rate": 1e-4}, "batch_size": 16},
        "partition": {
            "num_clients": 1,
            "scheme": "iid",
            "max_images": 16,
        },  # one client, because 11 million weights take time
        "cohort": {"min_clients": 1},
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
    # The rate is so small that a processor's rounding, which can flip a ReLU, hardly moves the weights.
    "training": {"batch_size": 8, "local_epochs": 2, "optimizer": {"learning_rate": 5e-4}},
    "cohort": {"min_clients": 3},
    "partition": {"dataset": GREYS, "num_clients": 3, "alpha": 0.5},
}


def write_data(folder: Path) -> None:
    """Write the data sets `GREYS` and `COLOURS`, computed with integers: four classes, each with its own pattern."""
    for name, num_channels in ((GREYS, 1), (COLOURS, 3)):
        arrays = {}
        for prefix, size in (("", 90), ("test_", 60)):
            labels = np.arange(size) % 4
            noise = _scattered(size, num_channels * 64, start=size)
            patterns = _scattered(4, num_channels * 64, start=7)
            arrays[f"{prefix}images"] = (patterns[labels] // 2 + noise // 2).reshape(size, num_channels, 8, 8)
            arrays[f"{prefix}labels"] = labels
        np.savez(folder / name, **arrays)


def _scattered(rows: int, columns: int, *, start: int) -> NDArray[np.uint8]:
    """Return bytes that look random and are the same with every version of numpy."""
    number = np.arange(start * 10_000, start * 10_000 + rows * columns, dtype=np.uint64)
    for _ in range(2):
        number = (number ^ (number >> np.uint64(15))) * np.uint64(2654435761) % np.uint64(2**32)
    return (number >> np.uint64(24)).astype(np.uint8).reshape(rows, columns)


def spec_of(curve: str) -> RunSpec:
    """Return the run that draws this curve."""
    if curve in OTHERS:
        return RunSpec.model_validate(_updated(_BASE, OTHERS[curve]))
    sections = METHODS.get(curve, {})
    return RunSpec.model_validate(
        _updated(_BASE, {**sections, "method": {"name": curve, **sections.get("method", {})}})
    )


def _updated(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` merged table by table. Lists and numbers are replaced."""
    merged = dict(base)
    for key, value in changes.items():
        both_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _updated(base[key], value) if both_tables else value
    return merged
