"""`fedssl export`: a pulled encoder for other programs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedssl.cli.output import Format, FormatOption, note, show_json

_NAMES = {"onnx": "encoder.onnx", "torchvision": "encoder-torchvision.safetensors", "timm": "encoder-timm.safetensors"}


def export(
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="What `fedssl run pull` or `fedssl simulate` wrote, or its model.")
    ],
    *,
    to: Annotated[Literal["onnx", "torchvision", "timm"], typer.Option(help="The form.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to.  [default: beside the model]")] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Write an encoder as an ONNX graph, or as a state dict for torchvision's or timm's ResNets.

    \b
    onnx               images float32 (N, C, S, S) of values 0..1 -> representations (N, H); it normalises by itself.
                       Needs pip install 'fedssl[onnx]'
    torchvision, timm  safetensors under their names, without a classifier: load with strict=False, and give it images
                       normalised as [data] of spec.yaml says

    In Python, `fedssl.models.load_encoder(FOLDER)` is all that is needed.
    """
    from fedssl.models import load_encoder
    from fedssl.models.exporting import export_onnx, export_state_dict

    encoder = load_encoder(source)
    folder = source if source.is_dir() else source.parent
    path = out or folder / _NAMES[to]
    path.parent.mkdir(parents=True, exist_ok=True)
    (export_onnx if to == "onnx" else export_state_dict)(encoder, path)
    shape = [encoder.data.channels, encoder.data.image_size, encoder.data.image_size]
    if output is Format.JSON:
        normalised = {"mean": encoder.data.mean, "std": encoder.data.std}
        show_json({"file": str(path), "to": to, "image_shape": shape, "width": encoder.feature_dim, **normalised})
    else:
        note(f"{path}: {encoder.config}, images {shape} -> representations of {encoder.feature_dim}")
