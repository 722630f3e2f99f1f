"""Encoders in files: models of fedssl, which have a spec, and networks of torchvision, which need none."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.cli.errors import UsageError
from fedssl.cli.output import note
from fedssl.cli.specs import read_spec
from fedssl.data import NORMALIZATIONS
from fedssl.errors import ArtifactError, SpecError
from fedssl.evaluation.suite import load_encoder, load_projected
from fedssl.methods.api import Context
from fedssl.models import build_encoder, initialised
from fedssl.models.pretrained import read_listed
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import INITIAL, MODEL, SPEC

_ENCODER = "encoder."
_FIRST, _CLASSIFIER = "conv1.weight", "fc."
_STEM_SIZES = {3: "cifar", 7: "imagenet"}


@dataclass(frozen=True, slots=True)
class Model:
    """The tensors of a file, and the spec that describes them."""

    path: Path
    spec: RunSpec
    tensors: Tensors

    def dataset(self) -> str:
        """Return the labelled data set that the spec names. Raises UsageError if it names none."""
        if self.spec.central_evaluation is not None:
            return self.spec.central_evaluation.dataset
        if self.spec.partition is not None:
            return self.spec.partition.dataset
        raise UsageError("the spec names no data set: give a labelled one with --data")

    def encoder(self) -> nn.Module:
        """Return the network from images to representations. Raises UsageError if the file does not hold it."""
        try:
            return load_encoder(self.tensors, self.spec)
        except SpecError as error:
            raise UsageError(f"{self.path}: {error}") from None

    def untrained(self) -> nn.Module | None:
        """Return the encoder before training: that of `initial.safetensors` next to the file, else a random one.

        Returns None, with a remark, if the encoder did not start at random and there is no such file.
        """
        path = self.path.with_name(INITIAL)
        if path.is_file():
            with suppress(SpecError, SafetensorError, ArtifactError):
                return load_encoder(read_listed(path), self.spec)
        if (initial := self.spec.model.initial) is not None:
            note(
                f"the encoder started from the {initial.source}, and there is no {path} with these weights: its "
                "gain is not shown (`fedssl run pull --initial --out FOLDER` fetches them)"
            )
            return None
        seed = Context(spec=self.spec, round_number=0).seed("model")  # that of a run's own first weights
        config, data = self.spec.model.encoder, self.spec.data
        return initialised(lambda: build_encoder(config, data.channels, data.image_size), seed)

    def projected(self) -> nn.Module:
        """Return the network from images to the projector's output. Raises UsageError if a part of it is missing."""
        try:
            return load_projected(self.tensors, self.spec)
        except SpecError as error:
            raise UsageError(f"{self.path}: {error}; angles are measured after the projector") from None


def read_model(path: Path, spec: str | None, plain: str | None = None) -> Model:
    """Read a model's file, or that in a run's folder, with its spec, or torchvision's network `plain`.

    A network whose tensors are not under `encoder.` is read as torchvision's. A spec, if given, states how images are
    normalised.

    Raises:
        UsageError: if the file or its spec is missing, or the file is not a safetensors file.
    """
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    if path.is_dir():
        path = path / MODEL
    if plain is not None and spec is None:
        tensors = _read(path)
        return Model(path, _spec_of(path, plain, tensors), _renamed(tensors))
    source = spec or str(path.parent / SPEC)
    if spec is None and not Path(source).exists():
        raise UsageError(
            f"there is no {source}: give the run's spec with --spec, or --encoder if this is a network of torchvision"
        )
    return Model(path, read_spec(source), _renamed(_read(path)))


def read_other(path: Path, like: Model) -> Model:
    """Read another model's file. If its folder has no spec, it is read with the spec of `like`. Raises UsageError."""
    if path.is_dir():
        path = path / MODEL
    if (spec := path.parent / SPEC).exists():
        return read_model(path, str(spec))
    return Model(path, like.spec, _renamed(_read(path)))


def _read(path: Path) -> Tensors:
    try:
        return read_listed(path)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise UsageError(f"{path} does not hold an encoder: it is not a safetensors file ({reason})") from None


def _renamed(tensors: Tensors) -> Tensors:
    """Rename torchvision's tensors as fedssl's, without the classifier. Others are returned unchanged."""
    if _FIRST not in tensors:
        return tensors
    return {f"{_ENCODER}{name}": tensor for name, tensor in tensors.items() if not name.startswith(_CLASSIFIER)}


def _spec_of(path: Path, name: str, tensors: Tensors) -> RunSpec:
    """Return the spec of a plain network, derived from its tensors."""
    first = tensors.get(_FIRST)
    if first is None or first.ndim != 4 or first.shape[1] not in (1, 3) or first.shape[2] not in _STEM_SIZES:
        raise UsageError(
            f"{path} is not torchvision's {name}: it has no {_FIRST} of 3 x 3 or 7 x 7 for 1 or 3 channels; "
            "leave out --encoder if it is a model of fedssl"
        )
    stem, channels = _STEM_SIZES[first.shape[2]], first.shape[1]
    images: dict[str, object] = {"channels": channels, "image_size": 32 if stem == "cifar" else 224}
    normalised = stem == "imagenet" and channels == 3
    if normalised:
        images["mean"], images["std"] = NORMALIZATIONS["imagenet"]
    how = "normalised with ImageNet's statistics" if normalised else "not normalised"
    note(f"{name} with the {stem} stem: images of {images['image_size']} pixels, {how}; to change that, give a "
         "spec with [data] and [model.encoder] (--spec)")  # fmt: skip
    return RunSpec.model_validate({"model": {"encoder": {"name": name, "stem": stem}}, "data": images})
