"""Writes an encoder, with a classifier if there is one, as the folder that timm and huggingface_hub load.

    timm.create_model("local-dir:FOLDER", pretrained=True)

gives the network, and `timm.data.resolve_model_data_config` the normalisation. The card has the code that turns and
crops an image as fedssl does, because timm's transform does not turn it. The files are those of a model on the Hugging
Face Hub: `config.json` in timm's form, `model.safetensors` with timm's names, and `README.md`, the model card.
"""

import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from fedssl.artifacts.tensors import save_tensors
from fedssl.errors import ExportError
from fedssl.files import write_atomically
from fedssl.models.classifier import Head
from fedssl.models.initialisation import on_meta_device
from fedssl.models.pretrained import PretrainedEncoder
from fedssl.models.timm_network import timm_defaults
from fedssl.protocol.model import EncoderConfig

CONFIG, WEIGHTS, README = "config.json", "model.safetensors", "README.md"
_LIBRARY = "timm"
_OWN_CODE = re.compile(r"```python\nfrom fedssl.*?```\n+", re.DOTALL)
_FIRST_CONVOLUTION = {"resnet": "conv1", "convnext": "stem.0", "vit": "patch_embed.proj"}
_CLASSIFIER = {"resnet": "fc", "convnext": "head.fc", "vit": "head"}


def export_timm_folder(encoder: PretrainedEncoder, head: Head | None, card: str | None, folder: Path) -> None:
    """Write the three files. `card` is the model card of the run's folder, or None if there is none.

    The network takes normalised images and gives logits, or representations without a head. With several labels per
    image, their sigmoids are the probabilities, otherwise their softmax is. Raises ExportError if timm has no such
    network.
    """
    require_timm(encoder)
    described = _config(encoder, head)
    tensors: dict[str, Tensor] = dict(encoder.encoder.state_dict())
    if head is not None:
        tensors |= _classifier_tensors(encoder, head, described)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / WEIGHTS)
    write_atomically(folder / CONFIG, json.dumps(described, indent=2) + "\n")
    write_atomically(folder / README, _readme(encoder, head, card))


def require_timm(encoder: PretrainedEncoder) -> None:
    """Raise ExportError unless timm can create this network by itself."""
    config = encoder.config
    if _LIBRARY not in encoder.encoder.libraries:
        raise ExportError(f"timm has no {config}: export it with --to onnx or --to monai")
    if _kind(config) == "resnet" and config.name != "timm" and config.stem != "imagenet":
        raise ExportError(
            f"timm has no {config}, only ResNets with the imagenet stem: export it with --to onnx or --to monai"
        )
    if config.name == "timm" and not isinstance(_classifier(config), str):
        raise ExportError(f"{config} has several classifiers: export its weights with --to timm")
    if encoder.data.window is not None:
        raise ExportError(
            "the run maps values of more than 8 bits to 0..1 (data.window), which timm's preprocessing cannot do: "
            "export it with --to onnx, and apply fedssl.data.window to the images"
        )


def _kind(config: EncoderConfig) -> str:
    return next((kind for kind in ("vit", "convnext") if config.name.startswith(kind)), "resnet")


def _classifier(config: EncoderConfig) -> Any:
    """Return the name of the classifier in timm's network: a text, or several for a few of its networks."""
    return timm_defaults(config).classifier if config.name == "timm" else _CLASSIFIER[_kind(config)]


def _classifier_tensors(encoder: PretrainedEncoder, head: Head, described: dict[str, Any]) -> dict[str, Tensor]:
    """Return the classifier's tensors by timm's names, in timm's shapes. Raises ExportError if timm's has others."""
    name = _classifier(encoder.config)
    own = {f"{name}.weight": head.weight, f"{name}.bias": head.bias}
    if encoder.config.name != "timm":
        return own
    import timm

    with on_meta_device():
        network = timm.create_model(
            described["architecture"], num_classes=described["num_classes"], **described["model_args"]
        )
    wanted = network.state_dict()
    others = wanted.keys() - own.keys() - encoder.encoder.state_dict().keys()
    if others or any(tensor.numel() != wanted[key].numel() for key, tensor in own.items()):
        what = f" ({', '.join(sorted(others))})" if others else ""
        raise ExportError(
            f"the classifier of {encoder.config} is not one linear layer{what}: export it with --to onnx or --to monai"
        )
    return {key: tensor.reshape(wanted[key].shape) for key, tensor in own.items()}  # some are a 1x1 convolution


def _config(encoder: PretrainedEncoder, head: Head | None) -> dict[str, Any]:
    """Return the description from which timm creates the network and prepares images."""
    config, data, kind = encoder.config, encoder.data, _kind(encoder.config)
    arguments: dict[str, Any] = {"in_chans": data.channels}
    if kind == "vit":
        pool = "token" if config.pooling == "class_token" else "avg"
        arguments |= {"img_size": data.image_size, "patch_size": config.patch_size, "global_pool": pool}
        arguments["depth"] = config.depth
    name, is_fixed, first = config.name.replace("-", "_"), kind == "vit", _FIRST_CONVOLUTION[kind]
    if kind == "vit":
        name += "_patch16_224"
    if config.name == "timm":
        defaults = timm_defaults(config)
        name, is_fixed, first = config.timm_model or "", defaults.fixed_input_size, defaults.first_conv
        arguments |= {"img_size": data.image_size} if is_fixed else {}
    num_classes = 0 if head is None else len(head.class_names)
    size = [data.channels, data.image_size, data.image_size]
    return {
        "architecture": name,
        "num_classes": num_classes,
        "num_features": encoder.feature_dim,
        "global_pool": arguments.get("global_pool", "avg"),
        "model_args": arguments,
        **({} if head is None else {"label_names": list(head.class_names)}),
        "pretrained_cfg": {
            "tag": "fedssl",
            "custom_load": False,
            "input_size": size,
            "fixed_input_size": is_fixed,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(data.mean or (0.0,) * data.channels),
            "std": list(data.std or (1.0,) * data.channels),
            "num_classes": num_classes,
            "pool_size": None,
            "first_conv": first,
            "classifier": _classifier(config),
        },
        "fedssl": {
            "multi_label": None if head is None else head.multi_label,
            "network": str(config),
        },
    }


def _readme(encoder: PretrainedEncoder, head: Head | None, card: str | None) -> str:
    """Return the model card with the header that the Hugging Face Hub reads."""
    task = "image-feature-extraction" if head is None else "image-classification"
    header = f"---\nlibrary_name: timm\npipeline_tag: {task}\ntags: [timm, fedssl, federated]\n---\n\n"
    size, mode = encoder.data.image_size, "L" if encoder.data.channels == 1 else "RGB"
    use = (
        "```python\nimport timm\nfrom PIL import Image, ImageOps\n\n"
        'model = timm.create_model("local-dir:.", pretrained=True).eval()  # this folder\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
        'with open("image.png", "rb") as file:  # of 8 bits. From a path, PIL scrambles some turned TIFF files\n'
        f'    image = ImageOps.exif_transpose(Image.open(file)).convert("{mode}")\n'
        f"image = ImageOps.fit(image, ({size}, {size}), method=Image.Resampling.BILINEAR)  # as in the training\n"
        f"{'representation' if head is None else 'logits'} = model(transform(image)[None])\n```\n"
    )
    body = f"# {encoder.config}\n" if card is None else _without_header(card)
    return f"{header}{body.rstrip()}\n\n## With timm\n\n{use}"


def _without_header(card: str) -> str:
    """Return a card without its YAML header, and without the code that loads fedssl's own folder."""
    if card.startswith("---\n"):
        card = card.split("\n---\n", 1)[1].lstrip()
    return _OWN_CODE.sub("", card)
