"""`fedssl export`: a pulled encoder in the formats of other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json
from fedssl.run_files import CARD

if TYPE_CHECKING:
    from fedssl.embeddings.encoders import Model
    from fedssl.models.classifier import Head
    from fedssl.models.pretrained import PretrainedEncoder

_NAMES = {
    "onnx": "encoder.onnx",
    "torchvision": "encoder-torchvision.safetensors",
    "timm": "encoder-timm.safetensors",
    "huggingface": "huggingface",
    "monai": "monai",
}
_CLASSIFIER = "classifier.onnx"
_WITH_HEAD = ("onnx", "huggingface", "monai")


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A folder that `fedssl run pull` or `fedssl simulate` wrote, or a model file in it."
        ),
    ],
    *,
    to: Annotated[Literal["onnx", "torchvision", "timm", "huggingface", "monai"], typer.Option(help="The format.")],
    head: Annotated[
        Path | None,
        typer.Option(
            metavar="HEAD",
            help="Add this classifier, which `fedssl classify --save-head` wrote, or that of a run's folder "
            "(`ridge-probe`, `classifier`).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The file or folder to write.  [default: in the model's folder]"),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Convert an encoder, with a classifier if you give one, to the format of another program.

    Example: `fedssl export run-1a2b3c4d --to onnx`

    \b
    onnx               images float32 (N, C, S, S) with values 0..1
                       -> representations (N, H). The graph normalises the
                       images. Needs pip install 'fedssl[onnx]'.
                       With --head: -> probabilities (N, classes); the
                       names of the classes are in the metadata
    torchvision, timm  safetensors with the names of that library, without a
                       classifier. Load with strict=False, and normalise
                       the images as in [data] of spec.yaml. ResNets; timm
                       also ConvNeXts and ViTs
    huggingface        a folder for timm and huggingface_hub: config.json,
                       model.safetensors and the model card. Images are
                       normalised by timm. With --head: -> logits. ResNets
                       with the imagenet stem, ConvNeXts and ViTs
    monai              a MONAI bundle: TorchScript, metadata, inference.json
                       and the model card. Needs --head: -> probabilities

    In Python you do not need this: `fedssl.models.load_encoder(FOLDER)` loads the encoder.
    """
    if head is not None and to not in _WITH_HEAD:
        raise UsageError(f"--head: {to} has no place for a classifier; use --to onnx, huggingface or monai")
    if head is None and to == "monai":
        raise UsageError("--to monai writes a network that gives probabilities: add a classifier by --head")
    from fedssl.embeddings.encoders import load_model

    folder = source if source.is_dir() else source.parent
    path = out or folder / (_CLASSIFIER if head is not None and to == "onnx" else _NAMES[to])
    path.parent.mkdir(parents=True, exist_ok=True)
    model = load_model(source)
    classifier = None if head is None else _read(head, model)
    _write(model.encoder, classifier, to, path, folder)
    _show(model.encoder, classifier, to, path, output)


def _read(head_file: Path, model: "Model") -> "Head":
    from fedssl.classification.head_file import require_encoder
    from fedssl.classification.run_head import head_at

    head = head_at(head_file)
    require_encoder(head, model, str(head_file))
    return head


def _write(encoder: "PretrainedEncoder", head: "Head | None", to: str, path: Path, folder: Path) -> None:
    from fedssl.models.exporting import export_classifier, export_onnx, export_state_dict
    from fedssl.models.monai_bundle import export_monai_bundle
    from fedssl.models.timm_folder import export_timm_folder

    card = folder / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else None
    if to == "huggingface":
        export_timm_folder(encoder, head, text, path)
    elif to == "monai":
        assert head is not None, "checked by the command"
        export_monai_bundle(encoder, head, text, path)
    elif to != "onnx":
        export_state_dict(encoder, path, to)
    elif head is None:
        export_onnx(encoder, path)
    else:
        export_classifier(encoder, head, path)


def _show(encoder: "PretrainedEncoder", head: "Head | None", to: str, path: Path, output: Format) -> None:
    data = encoder.data
    shape = [data.channels, data.image_size, data.image_size]
    if output is Format.JSON:
        about = {"file": str(path), "to": to, "image_shape": shape, "mean": data.mean, "std": data.std}
        if head is None:
            show_json({**about, "width": encoder.feature_dim})
        else:
            show_json({**about, "classes": head.class_names, "multi_label": head.multi_label})
        return
    gives = f"representations of {encoder.feature_dim}"
    if head is not None:
        gives = f"{'logits' if to == 'huggingface' else 'probabilities'} of {len(head.class_names)} classes"
    note(f"{path}: {encoder.config}, images {shape} -> {gives}")
