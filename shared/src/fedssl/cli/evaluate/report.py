"""The results of an evaluation, as a table or as JSON."""

import math
from typing import Any

from fedssl.cli.evaluate.steps import Findings
from fedssl.cli.output import Format, show_json, show_pairs, show_table
from fedssl.cli.scores import baselines_as_json, show_scores
from fedssl.evaluation import FineTuneResult, ProbeResult

Row = tuple[str, str, str]


def show(findings: Findings, output: Format) -> None:
    """Show the results as a table or as one JSON document."""
    if output is Format.JSON:
        show_json(document(findings))
        return
    if found := rows(findings):
        show_table(["measure", "#value", "how"], found)
    title = "next to its baselines"
    show_scores(title, findings.results, findings.untrained, findings.chance, initial=findings.initial)
    request = findings.request
    show_pairs(
        {
            "model": str(request.model),
            "data": f"{request.data}: {findings.num_labels:,} labels, {findings.num_test:,} test images",
            **({} if request.map is None else {"map": str(request.map)}),
        }
    )


def document(findings: Findings) -> dict[str, Any]:
    """Return the JSON document. Accuracies are shares of the test set, 0..1; angles are in degrees."""
    request, results = findings.request, dict(findings.results)
    found: dict[str, Any] = {
        "model": str(request.model),
        "data": request.data,
        "settings": request.settings,
        "num_labels": findings.num_labels,
        "num_test": findings.num_test,
    }
    if findings.probe is not None:
        found["linear_probe"] = results.pop("probe")
        found["linear_probe_in_full"] = _probe(findings.probe)
    found |= results
    if findings.chance is not None:
        found["baselines"] = baselines_as_json(findings.untrained, findings.chance)
    if findings.semi:
        found["semi"] = [
            {"share": share, "settings": request.tuning, **_tuned(result)} for share, result in findings.semi.items()
        ]
    if findings.transfer is not None:
        tuned = findings.transfer.fine_tuned
        found["transfer"] = {
            "data": request.transfer,
            "linear_probe": _probe(findings.transfer.probe),
            "fine_tuned": None if tuned is None else _tuned(tuned),
        }
    if findings.angles is not None:
        angles = findings.angles
        found["angles"] = {name: getattr(angles, name) for name in angles.__slots__}
    if request.map is not None:
        found["map"] = str(request.map)
    return found


def rows(findings: Findings) -> list[Row]:
    """Return a row per measure: its name, its value, and how it was measured."""
    request, results = findings.request, findings.results
    found: list[Row] = []
    if findings.probe is not None:
        found.append(("linear probe", _percent(results["probe"]), _how(request.settings, findings.probe)))
    if "knn" in results:
        voting = f"{min(200, findings.num_labels)} neighbours, weight exp(cosine / 0.1)"
        found.append(("kNN", _percent(results["knn"]), voting))
    if "uniformity" in results:
        found += _geometry(results, findings.width)
    for share, tuned in findings.semi.items():
        name = f"fine-tuned, {100 * share:g} % of labels"
        about = f"{request.tuning}, {tuned.num_labelled:,} labels"
        found.append((name, _percent(tuned.accuracy), _how(about, tuned)))
    if findings.transfer is not None:
        probe, fine_tuned = findings.transfer.probe, findings.transfer.fine_tuned
        found.append((f"{request.transfer}: linear probe", _percent(probe.accuracy), _how(request.settings, probe)))
        if fine_tuned is not None:
            about = f"the whole network, {fine_tuned.num_epochs} epochs"
            found.append((f"{request.transfer}: fine-tuned", _percent(fine_tuned.accuracy), _how(about, fine_tuned)))
    return found + _angles(findings)


def _geometry(results: dict[str, float], width: int) -> list[Row]:
    raw, centered, std = (results[name] for name in ("effective_rank", "effective_rank_centered", "feature_std"))
    return [
        ("uniformity", f"{results['uniformity']:.3f}", "-Lu, larger is better; 0 if all representations coincide"),
        ("alignment", f"{results['alignment']:.3f}", "of two views of an image; smaller is better"),
        ("effective rank", f"{raw:.1f}", f"of {width}; uncentred, as in SSD's formula"),
        ("effective rank, centred", f"{centered:.1f}", f"of {width}; after subtracting the mean"),
        ("feature std", f"{std:.4f}", f"{1 / math.sqrt(width):.4f} if spread evenly, 0 if collapsed"),
    ]


def _angles(findings: Findings) -> list[Row]:
    if (angles := findings.angles) is None:
        return []
    between = "between the classes' mean embeddings"
    return [
        ("local-global angle", f"{angles.local_global:.2f}°", "between both models' embeddings of an image"),
        ("inter-class angle, local", f"{angles.inter_class_local:.2f}°", between),
        ("inter-class angle, global", f"{angles.inter_class_global:.2f}°", between),
    ]


def _how(about: str, result: ProbeResult | FineTuneResult) -> str:
    if result.best_epoch == result.num_epochs:
        return about
    return f"{about}; {_percent(result.best_accuracy)} at best ({result.chosen})"


def _probe(result: ProbeResult) -> dict[str, Any]:
    names = ("accuracy", "best_accuracy", "best_epoch", "train_accuracy", "num_epochs")
    return {**{name: getattr(result, name) for name in names}, "chosen": result.chosen}


def _tuned(result: FineTuneResult) -> dict[str, Any]:
    names = ("accuracy", "best_accuracy", "best_epoch", "num_tests", "num_epochs", "num_labelled")
    return {**{name: getattr(result, name) for name in names}, "chosen": result.chosen}


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
