"""`fedssl export`: a pulled encoder in the formats of other programs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json

_NAMES = {"onnx": "encoder.onnx", "torchvision": "encoder-torchvision.safetensors", "timm": "encoder-timm.safetensors"}
_CLASSIFIER = "classifier.onnx"


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A folder that `fedssl run pull` or `fedssl simulate` wrote, or a model file in it."
        ),
    ],
    *,
    to: Annotated[Literal["onnx", "torchvision", "timm"], typer.Option(help="The format.")],
    head: Annotated[
        Path | None,
        typer.Option(
            metavar="HEAD",
            help="Add this classifier, which `fedssl classify --save-head` wrote, or that of a run's folder "
            "(`ridge-probe`): the graph gives probabilities.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write.  [default: in the model's folder]")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Convert an encoder to an ONNX graph, or to a state dict for torchvision (ResNets) or timm (ResNets, ViTs).

    Example: `fedssl export run-1a2b3c4d --to onnx`

    \b
    onnx               images float32 (N, C, S, S) with values 0..1
                       -> representations (N, H). The graph normalises the
                       images. Needs pip install 'fedssl[onnx]'.
                       With --head: -> probabilities (N, classes); the
                       names of the classes are in the metadata
    torchvision, timm  safetensors with the names of that library, without a
                       classifier. Load with strict=False, and normalise
                       the images as in [data] of spec.yaml

    In Python you do not need this: `fedssl.models.load_encoder(FOLDER)` loads the encoder.
    """
    if head is not None and to != "onnx":
        raise UsageError(f"--head: {to} has no place for a classifier; use --to onnx")
    from fedssl.models import load_encoder
    from fedssl.models.exporting import export_onnx, export_state_dict

    folder = source if source.is_dir() else source.parent
    path = out or folder / (_NAMES[to] if head is None else _CLASSIFIER)
    path.parent.mkdir(parents=True, exist_ok=True)
    if head is not None:
        _export_classifier(source, head, path, output)
        return
    encoder = load_encoder(source)
    if to == "onnx":
        export_onnx(encoder, path)
    else:
        export_state_dict(encoder, path, to)
    shape = [encoder.data.channels, encoder.data.image_size, encoder.data.image_size]
    if output is Format.JSON:
        normalised = {"mean": encoder.data.mean, "std": encoder.data.std}
        show_json({"file": str(path), "to": to, "image_shape": shape, "width": encoder.feature_dim, **normalised})
    else:
        note(f"{path}: {encoder.config}, images {shape} -> representations of {encoder.feature_dim}")


def _export_classifier(source: Path, head_file: Path, path: Path, output: Format) -> None:
    from fedssl.classification.head_file import require_encoder
    from fedssl.classification.run_head import head_at
    from fedssl.embeddings.encoders import load_model
    from fedssl.models.exporting import export_classifier

    model, head = load_model(source), head_at(head_file)
    require_encoder(head, model, str(head_file))
    encoder = model.encoder
    export_classifier(encoder, head, path)
    shape = [encoder.data.channels, encoder.data.image_size, encoder.data.image_size]
    if output is Format.JSON:
        normalised = {"mean": encoder.data.mean, "std": encoder.data.std}
        named = {"classes": head.class_names, "multi_label": head.multi_label}
        show_json({"file": str(path), "to": "onnx", "image_shape": shape, **normalised, **named})
    else:
        note(f"{path}: {encoder.config}, images {shape} -> probabilities of {len(head.class_names)} classes")
