"""`fedssl demo`: train an encoder from scratch, and show that it learnt something."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cli.accuracies import ACCURACIES
from fedssl.cli.arguments import SetOption
from fedssl.cli.connection.connect import short
from fedssl.cli.datasets.fetching import data_folder, ensure
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, console, note, show_json, show_pairs
from fedssl.cli.scores import baselines_as_json, show_scores
from fedssl.cli.specs import read_spec, require_partition
from fedssl.cli.up import DeviceOption, DirectoryOption, ThreadsOption, dealing_of, show_event
from fedssl.client import model_files
from fedssl.protocol.evaluation import EvaluationConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views import RunView
from fedssl.wording import plural

if TYPE_CHECKING:
    from fedssl.client import Client
    from fedssl.protocol.chance import Chance

DIRECTORY = Path(".fedssl-demo")
SPEC, FALLBACK = "demo.toml", "digits.toml"
NEIGHBOURS = "neighbours.png"
BEFORE, AFTER = "before training", "after training"

Results = dict[str, float]


@dataclass(frozen=True, slots=True)
class Trained:
    """A completed run, and what was fetched from it. `losses`: (round, loss) pairs per client."""

    run: RunView
    folder: Path
    losses: dict[str, list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Compared:
    """The encoder before and after training: accuracies, chance, and the share of neighbours of the query's class."""

    before: Results
    after: Results
    chance: "Chance | None"
    neighbours: dict[str, float]


def demo(
    directory: DirectoryOption = DIRECTORY,
    spec: Annotated[
        str | None, typer.Option(metavar="SPEC", help="What to train.  [default: examples/demo.toml]")
    ] = None,
    set_: SetOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0: any.")] = 0,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
    output: FormatOption = Format.TABLE,
) -> None:
    """Train a federation of four clients on this machine in about four minutes, and show what it learnt.

    Downloads Fashion-MNIST (or uses scikit-learn's digits if that fails), starts a federation as `fedssl up` does,
    submits a run, follows it, and compares the encoder before and after training on held-out images: by a linear probe
    and by nearest neighbours, next to chance. Draws the curves, and some images with their five nearest neighbours
    before and after training. Ctrl-C stops everything. When you start it again on the same folder, it resumes an
    unfinished run, or else starts a new one.
    """
    from fedssl.local import require_launcher

    require_launcher()
    wanted = _choose_spec(spec, set_)
    trained = _train(directory, wanted, port, device, threads)
    note("comparing the encoder before and after training")
    compared = _compare(trained, device)
    files = {
        "encoder": str(trained.folder / "encoder.safetensors"),
        "curves": str(_draw(trained, compared)),
        "neighbours": str(trained.folder / NEIGHBOURS),
        "model": str(trained.folder / "model.safetensors"),
        "spec": str(trained.folder / "spec.yaml"),
    }
    if output is Format.JSON:
        accuracies = {"before": compared.before, "after": compared.after}
        show_json(
            {
                "run": str(trained.run.id),
                **{when: {"linear_probe": a["probe"], "knn": a["knn"]} for when, a in accuracies.items()},
                "baselines": baselines_as_json(compared.before, compared.chance),
                "neighbours_of_same_class": compared.neighbours,
                "files": files,
            }
        )
        return
    _show(trained, compared, files)


def _choose_spec(spec: str | None, changes: list[str] | None) -> RunSpec:
    """Return the given spec, or else an example whose images are available."""
    source = spec or str(_example(SPEC))
    wanted = read_spec(source, changes)
    if ensure(require_partition(wanted, source).dataset, note) or spec is not None:
        return wanted
    note(f"continuing with scikit-learn's digits, which are real images too; to use Fashion-MNIST, put its files into "
         f"{data_folder()}, remove the folder of this demo and start it again")  # fmt: skip
    return read_spec(str(_example(FALLBACK)), changes)


def _example(name: str) -> Path:
    """Return the path of a file in examples/: in this directory, or else next to the sources that are running."""
    places = [Path("examples") / name, Path(__file__).parents[4] / "examples" / name]
    for place in places:
        if place.is_file():
            return place
    raise UsageError(f"there is no {places[0]} here: run this in the project's folder, or give a spec with --spec")


def _train(directory: Path, spec: RunSpec, port: int, device: str, threads: int) -> Trained:
    """Start the federation, train, fetch the results, and stop the federation. Raises RunNotCompleted."""
    from fedssl.cli.run.watch import require_completed, watch
    from fedssl_local.federation import Machine, running_federation
    from fedssl_local.folder import Folder

    folder, machine = Folder(directory), Machine(port=port, device=device, threads=threads)
    screen = console(stderr=True)
    with running_federation(
        folder,
        dealing_of(spec, {}),
        machine,
        on_step=note,
        on_event=lambda name, what: show_event(name, what, screen),
    ) as federation:
        screen.print(f"the coordinator is at {federation.url}; the operator's token is in {folder.operator_token}")
        with federation.client(patience_seconds=60) as client:
            run = _resume_run(client, spec) or client.create_run(spec)
            what = f"{plural(run.num_rounds, 'round')} with {plural(len(run.clients), 'client')}"
            screen.print(f"run {short(run.id)}: {run.method}, {what}")

            def check() -> None:
                federation.raise_if_failed()
                federation.raise_if_given_up()  # the run would wait for it

            run = watch(client, run.id, on_poll=check, screen=screen)
            require_completed(run)
            trained = _fetch(client, run, directory / "results" / short(run.id))
        screen.print("trained; stopping the federation")
        return trained


def _resume_run(client: "Client", spec: RunSpec) -> RunView | None:
    """Resume an unfinished run of this spec, and return it, or None if there is none."""
    for summary in client.runs():
        if summary.state.value == "finished":
            continue
        run = client.run(summary.id)
        if run.spec != spec:
            continue
        note(f"resuming run {short(run.id)} after {plural(run.rounds_closed, 'round')}")
        if run.state.value == "created":
            return client.start(run.id)
        return client.resume(run.id) if run.state.value == "paused" else run
    return None


def _fetch(client: "Client", run: RunView, folder: Path) -> Trained:
    client.download_model(run.id, folder / model_files.INITIAL, "initial")
    client.download_model(run.id, folder / model_files.MODEL)
    model_files.export_encoder(folder / model_files.MODEL, folder / model_files.ENCODER)
    model_files.write_spec(run.spec, folder / model_files.SPEC)
    losses: dict[str, list[tuple[int, float]]] = {}
    for metric in client.metrics(run.id, "loss"):
        if metric.client_id is not None:
            losses.setdefault(metric.client_id, []).append((metric.round_number, metric.value))
    return Trained(run, folder, {name: sorted(losses[name]) for name in sorted(losses)})


def _compare(trained: Trained, device: str) -> Compared:
    """Measure the encoder before and after training, and draw the neighbours of some images."""
    import torch

    from fedssl.artifacts.tensors import load_tensors
    from fedssl.evaluation import extract_features, labels_of, plot_neighbours
    from fedssl.evaluation.neighbour_plot import choose_queries
    from fedssl.evaluation.suite import Labelled, evaluate_encoder, load_encoder, load_labelled
    from fedssl.protocol.chance import chance_of

    torch.set_num_threads(1)  # more threads are hardly faster for so little work, and much slower on shared cores
    spec, where = trained.run.spec, "cpu" if device == "auto" else device
    assert spec.partition is not None, "the demo's spec has one"
    config = EvaluationConfig(dataset=spec.partition.dataset, measures=("probe", "knn"))
    limits = {"max_train": config.max_train, "max_test": config.max_test}
    labelled = load_labelled(config.dataset, spec.data, **limits, seed=spec.seed, root=data_folder())
    names = {BEFORE: model_files.INITIAL, AFTER: model_files.MODEL}
    encoders = {when: load_encoder(load_tensors(trained.folder / name), spec) for when, name in names.items()}
    found = {
        when: evaluate_encoder(encoder, labelled, config, spec.data, device=where) for when, encoder in encoders.items()
    }
    shown = Labelled(labelled.train, labelled.test.subset(choose_queries(labels_of(labelled.test).tolist())))
    features = {
        when: (
            extract_features(encoder, shown.train, spec.data, where),
            extract_features(encoder, shown.test, spec.data, where),
        )
        for when, encoder in encoders.items()
    }
    neighbours = plot_neighbours(trained.folder / NEIGHBOURS, shown.train, shown.test, features)
    return Compared(found[BEFORE], found[AFTER], chance_of(labels_of(labelled.test).tolist()), neighbours)


def _draw(trained: Trained, compared: Compared) -> Path:
    from fedssl.evaluation import plot_curves

    path = trained.folder / "curves.png"
    accuracies = {text: (compared.before[name], compared.after[name]) for name, text in ACCURACIES.items()}
    plot_curves(path, trained.losses, accuracies)
    return path


def _show(trained: Trained, compared: Compared, files: dict[str, Any]) -> None:
    dataset = trained.run.spec.partition.dataset if trained.run.spec.partition else ""
    typer.echo(f"Accuracy on held-out images of {dataset}, by the same probes before and after training:")
    show_scores("", compared.after, compared.before, compared.chance)
    shares = ", ".join(f"{100 * share:.0f} % {when}" for when, share in compared.neighbours.items())
    typer.echo(f"nearest neighbours in the picture that are of their query's class: {shares}")
    show_pairs(files)
