"""The evaluations that a simulation makes between its rounds."""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from fedssl.artifacts.tensors import Tensors
from fedssl.data import ImageData
from fedssl.data.image_cache.build import CachedData
from fedssl.data.site_labels import SiteLabels, own_labels, with_run_classes
from fedssl.errors import DataError
from fedssl.evaluation import labels_of
from fedssl.evaluation.site import SiteEvaluation, evaluate_at_site, evaluate_head, weights_at_site
from fedssl.evaluation.site_heads import run_heads
from fedssl.evaluation.suite import Labelled, evaluate_encoder, load_encoder
from fedssl.models.pretrained import encoder_of
from fedssl.protocol.chance import chance_of
from fedssl.protocol.evaluation import EvaluationConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts, SiteHead
from fedssl.simulation.results import Result, judged_models

OnJudging = Callable[[int, str, float | None], None]
OnEvaluation = Callable[[int, dict[str, float]], None]

_Counted = TypeVar("_Counted", SiteEvaluation, SiteCounts)


class CentralEvaluator:
    """Evaluates the encoder of each round that the spec names, once."""

    def __init__(
        self, spec: RunSpec, images: Labelled | None, device: str, on_judging: OnJudging, on_evaluation: OnEvaluation
    ) -> None:
        self._spec, self._device = spec, device
        self._on_judging, self._on_evaluation = on_judging, on_evaluation
        self._images = images
        self.chance = None if images is None else chance_of(labels_of(images.test).tolist())

    def evaluate_if_due(self, result: Result) -> None:
        """Evaluate the last round's encoder, unless that is not due or has been done."""
        config, number = self._spec.central_evaluation, result.rounds_done
        if config is None or self._images is None:
            return
        if number in result.evaluations_by_round or not _is_due(config, result):
            return
        tell, data = functools.partial(self._on_judging, number), self._spec.data
        encoders = (load_encoder(tensors, self._spec) for tensors in judged_models(result).values())
        found = [
            evaluate_encoder(each, self._images, config, data, device=self._device, on_progress=tell)
            for each in encoders
        ]
        measures = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
        if len(found) > 1:
            accuracies = [name for name in ("probe", "knn") if name in measures]
            measures |= {f"{name}_min": _least([each[name] for each in found]) for name in accuracies}
        result.evaluations = result.evaluations_by_round[number] = measures
        self._on_evaluation(number, measures)


class SiteEvaluator:
    """Evaluates the encoder of the rounds that the spec names at each client, on its own labelled images."""

    def __init__(
        self, spec: RunSpec, shards: Mapping[str, ImageData | CachedData], device: str, on_judging: OnJudging
    ) -> None:
        self._spec, self._device, self._on_judging = spec, device, on_judging
        self._config = spec.site_evaluation
        self._shards = {} if self._config is None else shards
        self._labels = {name: self._labels_of(name, images) for name, images in self._shards.items()}

    def evaluate_if_due(self, result: Result, lacking: Collection[str] = ()) -> None:
        """Evaluate the last round's encoder, unless that is not due or has been done.

        `lacking`: the clients that have lost their state, and so cannot evaluate what needs it.
        """
        number = result.rounds_done
        if self._config is None or number in result.site_evaluations:
            return
        if _is_due(self._config, result):
            models = judged_models(result)
            unable = lacking if self._needs_states else ()
            answers = {
                name: f"this site has lost its client state, and has not trained again up to round {number}"
                if name in unable
                else self._answer(models.get(name, models.get("")), name, result)
                for name in self._shards
            }
            result.site_evaluations[number] = {
                name: answer if isinstance(answer, str) else answer.counts for name, answer in answers.items()
            }
            known = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
            cross_site = {
                owner: {
                    name: self._judged(models.get(name, models.get("", {})), name, number, answer.head)
                    for name in known
                    if name != owner
                }
                for owner, answer in known.items()
                if answer.head is not None
            }
            if cross_site:
                result.cross_site[number] = cross_site

    @property
    def _needs_states(self) -> bool:
        """True if sites evaluate what is in their client states."""
        assert self._config is not None, "only with an evaluation at the sites"
        return self._spec.model.batch_norm == "local" or "personal" in self._config.site_config.run_heads

    def _answer(self, model: Tensors | None, name: str, result: Result) -> SiteEvaluation | str:
        assert self._config is not None, "only with an evaluation at the sites"
        if model is None:
            return f"this site has not trained up to round {result.rounds_done}, so it has no encoder of its own"
        state = result.client_states.get(name)
        heads = run_heads(self._config.site_config, model, state)
        return self._or_reason(evaluate_at_site, model, state, name, result.rounds_done, heads=heads)

    def _judged(self, model: Tensors, name: str, number: int, head: SiteHead) -> SiteCounts | str:
        return self._or_reason(evaluate_head, model, None, name, number, head=head)

    def _or_reason(
        self,
        evaluate: Callable[..., _Counted],
        model: Tensors,
        state: Tensors | None,
        name: str,
        number: int,
        **heads: Any,
    ) -> _Counted | str:
        """Return a site's counts, or why it has none. The state is needed only if the site has its own BatchNorm."""
        images = self._shards[name]
        try:
            own = weights_at_site(model, state, self._spec, number)
            return evaluate(
                encoder_of(own, self._spec.model.encoder, self._spec.data).to(self._device),
                images.squares if isinstance(images, CachedData) else images.subset,
                self._labels[name],
                self._spec,
                name,
                device=self._device,
                on_progress=lambda: self._on_judging(number, f"images of {name}", None),
                **heads,
            )
        except DataError as error:
            return str(error)

    def _labels_of(self, name: str, images: ImageData | CachedData) -> SiteLabels:
        config = self._config
        assert config is not None, "only with an evaluation at the sites"
        labels = own_labels(images, f"the images of {name}")
        return with_run_classes(labels, config.site_config.classes, multi_label=config.site_config.multi_label)


def _is_due(config: EvaluationConfig, result: Result) -> bool:
    """Return whether the newest weights should be evaluated.

    As on the coordinator, a round without new weights is evaluated only if it is the last.
    """
    number, last = result.rounds_done, result.spec.num_rounds
    is_new = number in (0, last) or result.history[-1].gave_weights
    return is_new and config.is_due(number, last)


def _least(values: list[float]) -> float:
    """Return the smallest value, or NaN if any value is NaN, because an encoder that diverged is the worst."""
    return math.nan if any(map(math.isnan, values)) else min(values)
