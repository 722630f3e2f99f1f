"""Trains one work item: takes a broadcast, returns an update. Only this module uses the device."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import structlog
import torch

from fedssl.aggregation import OutOfRange
from fedssl.artifacts.finite import check_finite
from fedssl.artifacts.header import max_file_bytes
from fedssl.artifacts.tensors import Tensors, check_file, read_tensors
from fedssl.client import Rejected, WorkerClient
from fedssl.engine import LocalProgress, LocalResult, run_local_round
from fedssl.engine.aggregation import ValueOutOfRange
from fedssl.engine.devices import memory_errors_explained
from fedssl.engine.secure_sums import UnusableUpdate, client_words, context_of, num_client_words
from fedssl.errors import ArtifactDamaged, Cancelled, DataError, MethodError, NotFinite
from fedssl.evaluation.site import weights_at_site
from fedssl.methods import METHODS, Method
from fedssl.methods.api import ClientData, ClientState, Context, Update
from fedssl.methods.site_data import wants_site_labels, with_site_labels
from fedssl.parallel.devices import train_on_devices
from fedssl.protocol.methods.distillation import distillation_of
from fedssl.protocol.methods.supervised import SupervisedConfig
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.plan import TensorSpec
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_work import OUT_OF_RANGE, SECURE_PROTOCOL, version_refusal
from fedssl.protocol.site_work import SiteEvaluationItem
from fedssl.protocol.states import Cause
from fedssl.protocol.work import AcceptedUpdate, Progress, StateLost, WorkItem
from fedssl.secure_aggregation import RoundContext, Words
from fedssl.secure_aggregation.round_context import round_context
from fedssl_worker.causes import CannotTrain, from_coordinator
from fedssl_worker.data import UNREADABLE, OwnImages, PreparedImages, PublicImages
from fedssl_worker.devices import describe_environment, image_device
from fedssl_worker.labels import OwnLabels, require_class_folders
from fedssl_worker.state import ClientStateLost, ClientStates, Finished, work_digest

log = structlog.get_logger()

_FROZEN_KEPT = 4
"""The number of runs whose frozen tensors stay on this machine."""

OnProgress = Callable[[Progress], None]


class Executor:
    """Turns work items into finished updates."""

    def __init__(
        self,
        client: WorkerClient,
        images: OwnImages,
        states: ClientStates,
        broadcasts: Path,
        *,
        client_id: str,
        device: torch.device,
        devices: Sequence[torch.device] = (),
        public: PublicImages | None = None,
        encoder: EncoderConfig | None = None,
        max_artifact_bytes: int | None = None,
        labels: OwnLabels | None = None,
        before_training: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up an executor.

        Args:
            devices: the devices that train each round together, if there are several.
            max_artifact_bytes: limits the broadcast and the update, unless it is None.
            labels: the labels of the images, for methods that use the sites' own labels.
            before_training: is called before the images are used for a round, and may replace them.
        """
        self._client = client
        self._images = images
        self._states = states
        self._broadcasts = broadcasts
        self._client_id = client_id
        self._device = device
        self._devices = devices or (device,)
        self._encoder = encoder
        self._max_artifact_bytes = max_artifact_bytes
        self._labels = labels
        self._before_training = before_training
        self._public = public or PublicImages(image_device(self._devices))

    def execute(self, item: WorkItem, on_progress: OnProgress) -> Finished:
        """Train, unless the same work has an update already that was not submitted.

        `on_progress` may raise Cancelled. Raises CannotTrain, StateUnwritable, DeviceError (out of memory), DataError,
        MethodError, ArtifactError (the broadcast is not the announced one) and ClientError. `causes.cause_of` returns
        whose problem each of them is.
        """
        self._check_sizes(item)
        method = self._method_of(item)
        self._check_encoder(item)
        self._states.require_writable(item.run_id)  # before time is spent on a training that cannot be kept
        self._before_training()
        images = self._grouped(item, self._labelled(item, self._images.prepared(item.spec.data)))
        work = work_digest(item, images.fingerprint, describe_environment(self._devices))
        self.discard(item, work=work)
        if (finished := self._states.finished(item.run_id, work)) is not None:
            log.info("work.already_trained", digest=finished.digest)
            if finished.lost is not None:
                self._report_loss(item, finished.lost)
            return finished
        downloading = Progress(phase="downloading", epoch=0, num_epochs=0, step=0, num_steps=0)
        on_progress(downloading)
        with from_coordinator():
            context = self._context(item, lambda _: on_progress(downloading))
            received = self._received(item, lambda _: on_progress(downloading))
        state, lost = self._state_of(item, keeps_state=method.bind(item.spec).client.keeps_state(context))
        try:
            with memory_errors_explained(self._device.type, item.spec.training.batch_size):
                result = self._train(method, received, state, images.data, context, on_progress)
        except MethodError:
            self._require_finite_broadcast(item)
            raise
        if images.unreadable:  # leaves only if the policy allows a metric of this name
            metrics = {**result.metrics, UNREADABLE: float(len(images.unreadable))}
            result = dataclasses.replace(result, metrics=metrics)
        return self._states.keep(item, work, result, lost)

    def discard(self, item: WorkItem, *, work: str | None = None, resent: AcceptedUpdate | None = None) -> None:
        """Remove what the item's run no longer needs. `work` and `resent` are those of `ClientStates.discard`."""
        keeps = _evaluates_states(item.spec)
        self._states.discard(item.run_id, item.last_accepted, work=work, resent=resent, keeps_accepted=keeps)

    def state_of(self, item: SiteEvaluationItem) -> Tensors | None:
        """Return the client's state that this site should evaluate, or None if it has none. Raises CannotTrain."""
        if not _evaluates_states(item.spec):
            return None
        try:
            return self._states.accepted(item.run_id, item.last_accepted)
        except ClientStateLost as error:
            raise CannotTrain(f"the site's own classifier cannot be evaluated: {error}") from error

    def weights_of(self, item: SiteEvaluationItem) -> Mapping[str, torch.Tensor]:
        """Return the weights that this site should evaluate, with its own BatchNorm if it keeps one.

        Raises CannotTrain, ArtifactError and ClientError, and DataError or ClientStateLost without that BatchNorm.
        """
        if (why := self._too_large("weights", item.plan.received)) is not None:
            raise CannotTrain(why)
        self._method_of(item)
        with from_coordinator():
            model = self._fetch(item.broadcast, item.plan.received, lambda _: None)
        keeps_norms = item.spec.model.batch_norm == "local"
        state = self._states.accepted(item.run_id, item.last_accepted) if keeps_norms else None
        return weights_at_site(model, state, item.spec, item.round_number)

    def secure_context(self, item: WorkItem) -> RoundContext:
        """Return the context of a secure round, computed from what this worker itself knows. Raises CannotTrain."""
        if (why := version_refusal(SECURE_PROTOCOL, item.secure_protocol or 1)) is not None:
            raise CannotTrain(why)
        method = self._method_of(item)
        try:
            return round_context(
                str(item.run_id),
                item.round_number,
                spec=item.spec,
                plan=method.bind(item.spec).plan,
                broadcast=item.broadcast,
                frozen=item.frozen,
                num_words=num_client_words(method, context_of(item)),
                cohort=item.secure_cohort or (),
                total_bits=item.total_bits,
            )
        except ValueError as error:
            raise CannotTrain(f"the coordinator's cohort has no secure sum: {error}", Cause.COORDINATOR) from None

    def secure_words(self, item: WorkItem, finished: Finished) -> Words:
        """Return the words of an update, which are to be masked.

        Raises CannotTrain, without a number in its message, if the update cannot be used or has a value out of range.
        """
        broadcast = self._fetch(item.broadcast, item.plan.broadcast, lambda _: None)
        update = Update(
            item.client_id,
            finished.num_examples,
            lambda: read_tensors(finished.update, finished.digest),
            finished.metrics,
        )
        num_clients, method = len(item.secure_cohort or ()), self._method_of(item)
        try:
            words = client_words(method, broadcast, update, num_clients, context_of(item))
        except (UnusableUpdate, ValueOutOfRange) as error:
            message = "the update cannot be used: it is not finite, or lies beyond every possible training"
            if isinstance(error.__cause__, OutOfRange):
                message = f"{OUT_OF_RANGE}{error.__cause__.tensor}: a value does not fit into its word: "
                message += "lower training.optimizer.learning_rate"
            raise CannotTrain(message, Cause.SPEC) from None
        return words.numpy().view(np.uint64)

    def _labelled(self, item: WorkItem, images: PreparedImages) -> PreparedImages:
        """Return the images with the labels that the run's method trains on. Raises DataError.

        The fingerprint then covers the labels too, so an update from before a correction of the labels is not sent
        again.
        """
        if isinstance(item.spec.method, SupervisedConfig):
            require_class_folders(self._images.num_class_folders, item.spec.method)
        if (config := wants_site_labels(item.spec)) is None:
            return images
        if self._labels is None:
            raise DataError("this site has no labels: its worker was started without --labels")
        labels = self._labels.for_run(config).without(images.unreadable)
        data = with_site_labels(images.data.images, labels, item.spec, item.client_id)
        assert data.labels is not None, "just added"
        assert data.held_out is not None, "just added"
        digest = hashlib.sha256(images.fingerprint.encode())
        for tensor in (data.labels, data.held_out):
            digest.update(tensor.cpu().numpy().tobytes())
        return dataclasses.replace(images, data=data, fingerprint=digest.hexdigest())

    def _grouped(self, item: WorkItem, images: PreparedImages) -> PreparedImages:
        """Return the images with the groups that the run's batches need: those of the labels, or else of the files.

        The fingerprint then covers the groups too.
        """
        if not item.spec.data.distinct_groups:
            return images
        own = None if self._labels is None else self._labels.labels.without(images.unreadable).groups
        groups = images.data.groups if own is None else torch.from_numpy(own)
        if groups is None:
            return images  # the training reports it
        digest = hashlib.sha256(images.fingerprint.encode() + groups.numpy().tobytes()).hexdigest()
        return dataclasses.replace(images, data=dataclasses.replace(images.data, groups=groups), fingerprint=digest)

    def _state_of(self, item: WorkItem, *, keeps_state: bool) -> tuple[Tensors | None, StateLost | None]:
        """Return the client's state, or None for a cold start, and the state that is lost if that is the reason.

        A loss is first reported to the coordinator, which decides what follows. Raises Cancelled if it pauses the run.
        """
        try:
            return self._states.accepted(item.run_id, item.last_accepted), None
        except ClientStateLost as error:
            if not keeps_state:
                return {}, None  # the file was empty
            log.warning("client_state.lost", accepted_round=error.lost.round_number, reason=str(error))
            self._report_loss(item, error.lost)
            return None, error.lost

    def _report_loss(self, item: WorkItem, lost: StateLost) -> None:
        try:
            reply = self._client.heartbeat(item.assignment_id, state_lost=lost)
        except Rejected as refused:
            log.warning("client_state.loss_not_reported", reason=str(refused), consequence="the client starts cold")
            return
        if not reply.carry_on:
            raise Cancelled(reply.reason or "the coordinator does not let the client train without its state")

    def _train(
        self,
        method: Method,
        received: Tensors,
        state: ClientState | None,
        data: ClientData,
        context: Context,
        on_progress: OnProgress,
    ) -> LocalResult:
        def report(local: LocalProgress) -> None:
            on_progress(_progress(local))

        if len(self._devices) == 1:
            return run_local_round(method, received, state, data, context, report)
        return train_on_devices(received, state, data, context, [str(each) for each in self._devices], report)

    def _require_finite_broadcast(self, item: WorkItem) -> None:
        """Raise CannotTrain if the training failed because the broadcast itself holds NaN or infinity."""
        try:
            check_finite(self._broadcasts / f"{item.broadcast}.safetensors")
        except NotFinite as error:
            message = f"the broadcast {item.broadcast} holds NaN or infinity: no training can start from it"
            raise CannotTrain(message, Cause.COORDINATOR) from error

    def _context(self, item: WorkItem, on_bytes: Callable[[int], None]) -> Context:
        return Context(
            spec=item.spec,
            round_number=item.round_number,
            client_id=item.client_id,
            device=self._device,
            dimensions=item.dimensions,
            public=self._public.load(item.spec.public_data, item.spec.data, on_bytes),
        )

    def _check_sizes(self, item: WorkItem) -> None:
        """Raise CannotTrain if the broadcast or the update is too large for this machine."""
        for name, tensors in (("weights", item.plan.received), ("update", item.plan.update)):
            if (why := self._too_large(name, tensors)) is not None:
                raise CannotTrain(why)

    def _too_large(self, name: str, tensors: Sequence[TensorSpec]) -> str | None:
        size, most = max_file_bytes(tensors), self._max_artifact_bytes
        if most is None or size <= most:
            return None
        return (
            f"the run's {name} has up to {size} bytes, and this worker accepts {most}: use a smaller model, or "
            "raise the worker's --max-artifact-bytes"
        )

    def _method_of(self, item: WorkItem | SiteEvaluationItem) -> Method:
        """Return the method if its version is the coordinator's, and the plan is the one of this installation."""
        name = item.spec.method.name
        method = METHODS.get(name)
        if method is None or method.version != item.method_version:
            own = "lacks it" if method is None else f"has version {method.version}"
            raise CannotTrain(
                f"the run needs {name} version {item.method_version}; this worker {own}: update the worker"
            )
        if item.client_id != self._client_id:
            raise CannotTrain(
                f"the work is for the client {item.client_id}, but this worker is for {self._client_id}",
                Cause.COORDINATOR,
            )
        if item.plan != method.bind(item.spec).plan:
            raise CannotTrain(
                f"the coordinator's artifact plan for {name} differs from this worker's, which determines what may "
                "leave: install the same version on both",
                Cause.COORDINATOR,
            )
        return method

    def _check_encoder(self, item: WorkItem) -> None:
        """Raise CannotTrain if clients may differ and the run gives this one another encoder than it declared."""
        config = distillation_of(item.spec.method)
        if config is None or self._encoder is None:
            return
        given = config.encoder_of(item.client_id, item.spec.model)
        if not given.is_same_network(self._encoder):
            raise CannotTrain(
                f"the run gives {item.client_id} the encoder {given}, and its worker has declared {self._encoder}: "
                'create a run with method.reducer.client_encoders = "declared", or start the worker with that encoder',
                Cause.SPEC,
            )

    def _received(self, item: WorkItem, on_bytes: Callable[[int], None]) -> Tensors:
        """Return the broadcast with the run's frozen tensors, which this worker fetches only once."""
        received = self._fetch(item.broadcast, item.plan.broadcast, on_bytes)
        if not item.plan.frozen:
            return received
        if item.frozen is None:
            raise CannotTrain("the coordinator names no frozen tensors, and the plan has some", Cause.COORDINATOR)
        return {**received, **self._fetch(item.frozen, item.plan.frozen, on_bytes, kept=_FROZEN_KEPT)}

    def _fetch(
        self, digest: str, tensors: tuple[TensorSpec, ...], on_bytes: Callable[[int], None], *, kept: int = 1
    ) -> Tensors:
        """Return an artifact that the coordinator sends, from the cache if it is complete there.

        The cache keeps the `kept` last used files of this kind, complete or in part.
        """
        folder = self._broadcasts if kept == 1 else self._broadcasts / "frozen"
        folder.mkdir(exist_ok=True)
        path = folder / f"{digest}.safetensors"
        others = [other for other in folder.iterdir() if digest not in other.name and other.is_file()]
        others.sort(key=lambda other: other.stat().st_mtime, reverse=True)
        for other in others[kept - 1 :]:
            other.unlink()
        try:
            found = read_tensors(path, digest)
        except (FileNotFoundError, ArtifactDamaged):
            self._client.download(digest, path, max_file_bytes(tensors), on_bytes)
            found = read_tensors(path, digest)
        os.utime(path)
        check_file(path, tensors, "broadcast" if kept == 1 else "frozen tensors")
        return found


def _evaluates_states(spec: RunSpec) -> bool:
    """Return whether evaluations at the sites need the client states, which are then kept for all rounds."""
    config = spec.site_evaluation
    return config is not None and "personal" in config.site_config.run_heads


def _progress(local: LocalProgress) -> Progress:
    return Progress(phase="training", **dataclasses.asdict(local))
