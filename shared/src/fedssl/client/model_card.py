"""The files next to a pulled encoder: a model card for people, and its lineage, as digests, for programs."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedssl.evaluation.comparable import names_of, setting_of
from fedssl.protocol.initial import InitialConfig
from fedssl.protocol.methods.site_labels import SiteLabelsConfig
from fedssl.protocol.model import ModelConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views import EvaluationView, RoundView, RunView, SiteRoundView
from fedssl.run_files import CARD, LINEAGE, write_json, write_text

_AGGREGATED = ("aggregated", "partial")
_NORMS = {
    "local": "each site keeps its own; these weights have the initial one, and are complete only at a site",
    "recalibrate": "averaged; each site computes its statistics on its own images",
}
_SCORES = ("probe", "knn", "uniformity", "alignment", "effective_rank")


def write_card(
    run: RunView,
    rounds: Iterable[RoundView],
    evaluations: Iterable[EvaluationView],
    model: str,
    encoder: Path,
    folder: Path,
    sites: Iterable[SiteRoundView] = (),
) -> dict[str, Path]:
    """Write both files, and return their paths. `model` is the digest of the run's weights.

    `encoder` is the file extracted from them, and `sites` are the evaluations at the sites. Rounds that were
    closed after `run` was fetched are left out.
    """
    rounds = [view for view in rounds if view.number <= run.rounds_closed]
    evaluations = [row for row in evaluations if row.state == "completed" and row.round_number <= run.rounds_closed]
    lineage = lineage_of(run, rounds, model, hashlib.sha256(encoder.read_bytes()).hexdigest())
    write_json(folder / LINEAGE, lineage)
    judged = [view for view in sites if view.round_number <= run.rounds_closed]
    write_text(folder / CARD, card(run, rounds, evaluations, lineage, judged))
    return {"card": folder / CARD, "lineage": folder / LINEAGE}


def lineage_of(run: RunView, rounds: Sequence[RoundView], model: str, encoder: str) -> dict[str, Any]:
    """Return the files from which the weights were made: each round's broadcast, and the updates in its weights.

    A round that was skipped or failed lists no updates: they were accepted, but not used.
    """
    return {
        "run": str(run.id),
        "method": {"name": run.method, "version": run.spec.method.info.version},
        "spec_sha256": hashlib.sha256(run.spec.model_dump_json().encode()).hexdigest(),
        **({} if run.spec.model.initial is None else {"start": _start(run.spec.model.initial)}),
        "initial_model": run.initial_model,
        "rounds": [
            {
                "number": view.number,
                "verdict": view.verdict,
                "broadcast": view.broadcast,
                "updates": {
                    part.client_id: part.update
                    for part in view.assignments
                    if part.state == "accepted" and view.verdict in _AGGREGATED
                },
            }
            for view in rounds
        ],
        "model": model,
        "encoder": encoder,
    }


def card(
    run: RunView,
    rounds: Sequence[RoundView],
    evaluations: Sequence[EvaluationView],
    lineage: dict[str, Any],
    sites: Sequence[SiteRoundView] = (),
) -> str:
    """Return the card, in Markdown."""
    info, spec = run.spec.method.info, run.spec
    verdicts = [view.verdict for view in rounds if view.verdict is not None]
    counted = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    initial = spec.model.initial
    start = [] if initial is None else [(initial.source, lineage["start"]["digest"])]
    parts = [
        f"---\nlibrary_name: fedssl\ntags: [self-supervised, federated, {run.method}]\n---\n\n# {run.name}",
        f"{_made(spec, len(_examples(rounds)))} Made by fedssl, run `{run.id}`.{_began(initial)}",
        '```python\nfrom fedssl.models import load_encoder\n\nencoder = load_encoder(".")  # this folder\n```',
        "## Method",
        f"{info.title} (`{run.method}`, version {info.version}). {info.paper}",
        _table(
            ("", ""),
            [
                ("rounds", f"{run.rounds_closed} of {run.num_rounds}: {_counts(counted)}"),
                ("local epochs, batch size", f"{spec.training.num_epochs:g}, {spec.training.batch_size}"),
                ("seed", str(spec.seed)),
                *([("trained of the encoder", _trained(spec.model))] if spec.model.freezes else []),
                *_average(spec),
                *([("BatchNorm", _NORMS[spec.model.batch_norm])] if spec.model.batch_norm in _NORMS else []),
                ("left the clients", info.leaves_the_client),
                ("stayed on the clients", info.stays_on_the_client),
            ],
        ),
        "## Data",
        _data(run, rounds),
        "## Scores",
        _scores(evaluations),
        *_at_the_sites(sites),
        "## Lineage",
        "The sha256 of each file. The files of every round are listed in [lineage.json](lineage.json).",
        _table(
            ("file", "sha256"),
            [
                ("spec", lineage["spec_sha256"]),
                *start,
                ("weights before training", lineage["initial_model"]),
                ("model", lineage["model"]),
                ("encoder", lineage["encoder"]),
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _start(initial: InitialConfig) -> dict[str, Any]:
    """Return the weights that the encoder started from: their name, or their run and its round, and their digest."""
    return initial.model_dump(mode="json", exclude_none=True)


def _made(spec: RunSpec, num_owners: int) -> str:
    """Return a description of the weights, and of what they were made from."""
    owners = f"{num_owners} data owners" if num_owners != 1 else "1 data owner"
    method, encoder = spec.method, spec.model.encoder
    if isinstance(method, SiteLabelsConfig):
        return (
            f"An encoder, {encoder}, and a linear classifier of {', '.join(f'`{name}`' for name in method.classes)}, "
            f"from the labelled images of {owners} who shared neither images nor labels."
        )
    how = "with" if "labels" in getattr(method, "traits", ()) else "without"
    return f"An encoder, {encoder}, trained {how} labels by {owners} who shared no images."


def _average(spec: RunSpec) -> list[tuple[str, str]]:
    """Return the row about the average of the encoder, or nothing if the encoder is that of the last round."""
    config = spec.aggregation.encoder_average
    if config is None:
        return []
    return [("encoder", f"an exponential moving average over the rounds, decay {config.decay:g}")]


def _trained(model: ModelConfig) -> str:
    parts = [f"`{pattern}`" for pattern in model.trainable or ()]
    if model.lora is not None:
        layers = ", ".join(f"`{pattern}`" for pattern in model.lora.layers)
        parts.append(f"adapters of rank {model.lora.rank} of {layers}")
    return f"{', '.join(parts)}; the rest has its initial values, and was not sent"


def _began(initial: InitialConfig | None) -> str:
    if initial is None:
        return ""
    return f" It started from the {initial.source}, so the scores of round 0 are those of these weights."


def _examples(rounds: Sequence[RoundView]) -> dict[str, int]:
    """Return the number of images per client, as last reported, for clients whose updates are in the weights."""
    return {
        part.client_id: part.num_examples or 0
        for view in rounds
        if view.verdict in _AGGREGATED
        for part in view.assignments
        if part.state == "accepted"
    }


def _data(run: RunView, rounds: Sequence[RoundView]) -> str:
    data, examples = run.spec.data, _examples(rounds)
    shape = f"{data.channels} x {data.image_size} x {data.image_size}"
    normalised = "not normalised" if data.mean is None else f"normalised by mean {data.mean} and std {data.std}"
    window = "" if data.window is None else data.window.model_dump_json(exclude_defaults=True)
    through = f" through the window {window}" if window else ""
    total = f"{sum(examples.values()):,} in total"
    text = f"Images of {shape}, values 0..1{through}, {normalised}; each client's own, {total}."
    if (partition := run.spec.partition) is not None:
        text += f" The spec describes them as a partition of `{partition.dataset}`, which the coordinator cannot check."
    rows = [(name, f"{count:,}") for name, count in sorted(examples.items())]
    return f"{text}\n\n{_table(('client', 'images'), rows)}" if rows else text


def _scores(evaluations: Sequence[EvaluationView]) -> str:
    if not evaluations:
        return "This encoder was not evaluated. `fedssl run evaluate` and `fedssl evaluate` do that."
    names = names_of(evaluations)
    rows = [
        (names[setting_of(row)], str(row.round_number), *(_number((row.results or {}).get(name)) for name in _SCORES))
        for row in evaluations
    ]
    return "Probe and kNN are the shares of test images classified correctly, 0..1.\n\n" + _table(
        ("data set", "round", *_SCORES), rows
    )


def _at_the_sites(sites: Sequence[SiteRoundView]) -> list[str]:
    """Return the section about the newest round that sites have evaluated, or nothing if there is none."""
    answered = [view for view in sites if view.mean]
    if not answered:
        return []
    view = max(answered, key=lambda each: each.round_number)
    names = list(view.mean)
    rows: list[tuple[str, ...]] = [
        (site.client_id, f"{site.num_test:,}", *(_number(site.results.get(name)) for name in names))
        for site in view.sites
        if site.results is not None
    ]
    rows.append(("worst site", "", *(_number(view.worst[name].value) for name in names)))
    rows.append(("mean", "", *(_number(view.mean[name]) for name in names)))
    rows.append(("pooled", "", *(_number(view.pooled[name]) for name in names)))
    silent = [site.client_id for site in view.sites if site.results is None]
    return [
        "## At the sites",
        f"The encoder of round {view.round_number}, evaluated by each data owner on its own labelled images. kNN and "
        "probe were trained on the owner's own labels; numbers are shares, 0..1."
        + (f" Without a result: {', '.join(silent)}." if silent else ""),
        _table(("client", "test images", *(name.replace("_", " ").replace("/", " ") for name in names)), rows),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _counts(counted: dict[Any, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in counted.items()) or "none closed"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(value).replace("|", "\\|") for value in line) + " |" for line in lines)
