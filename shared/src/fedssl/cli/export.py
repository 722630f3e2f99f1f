"""`fedssl export`: a pulled encoder in the formats of other programs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedssl.cli.output import Format, FormatOption, note, show_json

_NAMES = {"onnx": "encoder.onnx", "torchvision": "encoder-torchvision.safetensors", "timm": "encoder-timm.safetensors"}


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A folder that `fedssl run pull` or `fedssl simulate` wrote, or a model file in it."
        ),
    ],
    *,
    to: Annotated[Literal["onnx", "torchvision", "timm"], typer.Option(help="The format.")],
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
                       images. Needs pip install 'fedssl[onnx]'
    torchvision, timm  safetensors with the names of that library, without a
                       classifier. Load with strict=False, and normalise
                       the images as in [data] of spec.yaml

    In Python you do not need this: `fedssl.models.load_encoder(FOLDER)` loads the encoder.
    """
    from fedssl.models import load_encoder
    from fedssl.models.exporting import export_onnx, export_state_dict

    encoder = load_encoder(source)
    folder = source if source.is_dir() else source.parent
    path = out or folder / _NAMES[to]
    path.parent.mkdir(parents=True, exist_ok=True)
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
