"""Loads a trained encoder from the files that `fedssl run pull` and `fedssl simulate` write.

from fedssl.models import load_encoder

encoder = load_encoder("run-1a2b3c4d")
h = encoder(images)  # float images (B, C, S, S) of values 0..1 -> representations (B, H)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedssl.artifacts.tensors import Tensors, load_tensors, read_tensors
from fedssl.artifacts.weight_names import PREFIX
from fedssl.errors import ArtifactDamaged, SpecError
from fedssl.models.encoders import Encoder, build_encoder
from fedssl.models.initial import loading_table
from fedssl.models.initialisation import initialised
from fedssl.models.lora import merged
from fedssl.protocol.data import DataConfig
from fedssl.protocol.explanation import spec_of
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import ENCODER, INITIAL, LINEAGE, MODEL, SPEC

M = TypeVar("M", bound=nn.Module)

FILES = (ENCODER, MODEL)
_LISTED = {ENCODER: "encoder", MODEL: "model", INITIAL: "initial_model"}  # the keys of their digests in lineage.json


class PretrainedEncoder(Encoder):
    """From images (B, C, S, S) of values 0..1, as the run's were before normalisation, to representations (B, H).

    `encoder` is the network itself, which takes normalised images. `config` describes it, `data` its training images.
    """

    def __init__(self, encoder: Encoder, config: EncoderConfig, data: DataConfig) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = config
        self.data = data
        self.feature_dim = encoder.feature_dim
        self._is_normalised = (data.mean, data.std) != (None, None)
        for name, values in (("mean", data.mean or (0.0,)), ("std", data.std or (1.0,))):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self._is_normalised:
            x = (x - self.get_buffer("mean")) / self.get_buffer("std")
        h: Tensor = self.encoder(x)
        return h


def load_encoder(path: Path | str, client_state: Path | str | None = None) -> PretrainedEncoder:
    """Load the encoder from a folder of `fedssl run pull` or `fedssl simulate`, or from a file in such a folder.

    Returns it in eval mode, on the CPU.

    Args:
        path: the folder or the file.
        client_state: a worker's `state.safetensors` of the run, for a run whose sites keep their own BatchNorm.

    Raises:
        SpecError: the folder has no weights, or its spec.yaml is missing, invalid, or describes another network, or the
            sites keep their own BatchNorm and there is no `client_state`, or it holds no tensor of the encoder.
        ArtifactDamaged: the file is not the one that lineage.json lists.
    """
    place = weights_file(Path(path))
    spec = read_spec(place.parent / SPEC)
    try:
        tensors = read_listed(place)
        if client_state is not None:
            tensors |= _own_encoder(Path(client_state), tensors)
    except (SafetensorError, OSError) as error:
        raise SpecError(f"{place} cannot be read: {str(error).splitlines()[0]}") from None
    if client_state is None:
        require_batch_norm(spec)
    config = spec.model.encoder
    return PretrainedEncoder(encoder_of(tensors, config, spec.data), config, spec.data).eval()


def _own_encoder(client_state: Path, tensors: Tensors) -> Tensors:
    """Return the tensors of the encoder that a client keeps. Raises SpecError if there are none."""
    kept = load_tensors(client_state)
    own = {name: tensor for name, tensor in kept.items() if name in tensors and name.startswith(PREFIX)}
    if not own:
        raise SpecError(
            f"{client_state} holds no tensor of the encoder: give the newest runs/RUN/*/state.safetensors in the "
            "worker's state folder"
        )
    return own


def require_batch_norm(spec: RunSpec) -> None:
    """Raise SpecError if the global weights lack a trained BatchNorm because each site keeps its own."""
    if spec.model.batch_norm == "local":
        raise SpecError(
            'with model.batch_norm = "local", these weights have the initial BatchNorm, and each site has its '
            "own: load the encoder at a site, with fedssl.models.load_encoder(FOLDER, client_state=FILE) and the "
            "newest runs/RUN/*/state.safetensors in the worker's state folder"
        )


def weights_file(path: Path) -> Path:
    """Return the file of weights in a folder, or the path itself if it is not a folder. Raises SpecError."""
    if not path.exists():
        raise SpecError(f"there is no file or folder {path}")
    if not path.is_dir():
        return path
    found = [path / name for name in FILES if (path / name).is_file()]
    if not found:
        raise SpecError(f"{path} holds neither {' nor '.join(FILES)}: `fedssl run pull` makes such a folder")
    return found[0]


def read_listed(path: Path) -> Tensors:
    """Return a file's tensors. Raises ArtifactDamaged if lineage.json lists the file with another digest."""
    try:
        listed = json.loads((path.parent / LINEAGE).read_text(encoding="utf-8")).get(_LISTED.get(path.name))
    except (OSError, ValueError, AttributeError):  # `fedssl simulate` writes none
        listed = None
    if not isinstance(listed, str):
        return load_tensors(path)
    try:
        return read_tensors(path, listed)
    except ArtifactDamaged as error:
        message = f"{path} is not the file that {LINEAGE} next to it lists ({error}): run `fedssl run pull` again"
        raise ArtifactDamaged(message) from error


def encoder_of(tensors: Mapping[str, Tensor], config: EncoderConfig, data: DataConfig) -> Encoder:
    """Load the encoder for such images from a model's tensors. Adapters are merged into their layers.

    Raises SpecError if the tensors do not hold the encoder.
    """
    own = merged({name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)})
    return loaded(initialised(lambda: build_encoder(config, data.channels, data.image_size), 0), "encoder", own)


def loaded(module: M, name: str, tensors: Mapping[str, Tensor]) -> M:
    """Load the tensors whose names begin with the module's. Raises SpecError if they are missing or do not fit."""
    prefix = f"{name}."
    own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    if not own:
        raise SpecError(f"the model holds no {name}: none of its tensors has a name that begins with {prefix}")
    try:
        module.load_state_dict(own)
    except RuntimeError:
        table = loading_table(_shapes(own), _shapes(module.state_dict()), ())
        raise SpecError(f"the model does not hold the {name} that the spec describes: {table}") from None
    return module


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def read_spec(path: Path) -> RunSpec:
    """Read the spec next to a run's weights. Raises SpecError."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        raise SpecError(f"there is no {path}, which describes the network: keep it next to the weights") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not a run spec that this version can read: {str(error).splitlines()[0]}") from None
    return spec_of(values, str(path))
