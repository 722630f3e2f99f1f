"""Encoders in files: fedssl's models with their spec, and torchvision's networks without one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedssl.cli.errors import UsageError
from fedssl.cli.output import note
from fedssl.errors import SpecError
from fedssl.experiments.files import SPEC

if TYPE_CHECKING:
    from torch import nn

    from fedssl.artifacts.tensors import Tensors
    from fedssl.protocol.runs import RunSpec

_ENCODER = "encoder."
_FIRST, _CLASSIFIER = "conv1.weight", "fc."
_STEM_SIZES = {3: "cifar", 7: "imagenet"}


@dataclass(frozen=True, slots=True)
class Model:
    """A file's tensors, and the spec that describes them."""

    path: Path
    spec: "RunSpec"
    tensors: "Tensors"

    def dataset(self) -> str:
        """The labelled data set that the spec names. Raises UsageError where it names none."""
        if self.spec.evaluation is not None:
            return self.spec.evaluation.dataset
        if self.spec.partition is not None:
            return self.spec.partition.dataset
        raise UsageError("the spec names no data set: give a labelled one with --data")

    def encoder(self) -> "nn.Module":
        """From images to representations. Raises UsageError where the file does not hold it."""
        from fedssl.judging import load_encoder

        try:
            return load_encoder(self.tensors, self.spec)
        except SpecError as error:
            raise UsageError(f"{self.path}: {error}") from None

    def projected(self) -> "nn.Module":
        """From images to the projector's output. Raises UsageError where the file does not hold both."""
        from fedssl.judging import load_projected

        try:
            return load_projected(self.tensors, self.spec)
        except SpecError as error:
            raise UsageError(f"{self.path}: {error}; angles are measured after the projector") from None


def read_model(path: Path, spec: str | None, plain: str | None = None) -> Model:
    """A model's file with its spec, or torchvision's network `plain`.

    A network that is not under `encoder.` is taken for torchvision's; with a spec, which then says how images are
    normalised, or by its own name.

    Raises:
        UsageError: the file or its spec is missing, or the file is no safetensors file.
    """
    from fedssl.cli.specs import read_spec

    if not path.exists():
        raise UsageError(f"there is no {path}")
    if plain is not None and spec is None:
        tensors = _read(path)
        return Model(path, _spec_of(path, plain, tensors), _renamed(tensors))
    source = spec or str(path.parent / SPEC)
    if spec is None and not Path(source).exists():
        raise UsageError(
            f"there is no {source}: give the run's spec with --spec, or for torchvision's network --encoder"
        )
    return Model(path, read_spec(source), _renamed(_read(path)))


def read_other(path: Path, like: Model) -> Model:
    """Another model's file; without a spec beside it, it is taken for one of the same spec. Raises UsageError."""
    if (beside := path.parent / SPEC).exists():
        return read_model(path, str(beside))
    return Model(path, like.spec, _renamed(_read(path)))


def _read(path: Path) -> "Tensors":
    from safetensors import SafetensorError

    from fedssl.artifacts.tensors import load_tensors

    try:
        return load_tensors(path)
    except FileNotFoundError:
        raise UsageError(f"there is no {path}") from None
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise UsageError(f"{path} does not hold the encoder: it is no safetensors file ({reason})") from None


def _renamed(tensors: "Tensors") -> "Tensors":
    """torchvision's names as fedssl's, without the classifier; others as they are."""
    if _FIRST not in tensors:
        return tensors
    return {f"{_ENCODER}{name}": tensor for name, tensor in tensors.items() if not name.startswith(_CLASSIFIER)}


def _spec_of(path: Path, name: str, tensors: "Tensors") -> "RunSpec":
    """What a plain network's own tensors say about it."""
    from fedssl.data import NORMALIZATIONS
    from fedssl.protocol.runs import RunSpec

    first = tensors.get(_FIRST)
    if first is None or first.ndim != 4 or first.shape[1] not in (1, 3) or first.shape[2] not in _STEM_SIZES:
        raise UsageError(
            f"{path} is no {name} of torchvision's: it has no {_FIRST} of 3 x 3 or 7 x 7 for 1 or 3 channels; "
            "for a model of fedssl's leave --encoder out"
        )
    stem, channels = _STEM_SIZES[first.shape[2]], first.shape[1]
    images: dict[str, object] = {"channels": channels, "image_size": 32 if stem == "cifar" else 224}
    normalised = stem == "imagenet" and channels == 3
    if normalised:
        images["mean"], images["std"] = NORMALIZATIONS["imagenet"]
    how = "with ImageNet's statistics" if normalised else "not at all"
    note(f"{name} with the {stem} stem: images of {images['image_size']} pixels, normalised {how}; a spec with "
         "[data] and [model.encoder] says it otherwise (--spec)")  # fmt: skip
    return RunSpec.model_validate({"model": {"encoder": {"name": name, "stem": stem}}, "data": images})
