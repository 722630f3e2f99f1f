"""FedDINO: its loss against an independent one, its teacher, its center, its schedules, and what it sends."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from fedssl.engine.steps import eager_step
from fedssl.methods.api import Schedule
from fedssl.methods.objectives.dino import Prototypes, center, prototypes
from fedssl.protocol.methods.feddino import FedDINOConfig
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import Training, local_round, start, training


def _spec(training_: dict[str, Any] | None = None, **settings: Any) -> RunSpec:
    changes = {} if training_ is None else {"training": training_}
    return method_spec("feddino", method={"name": "feddino", "num_prototypes": 32, **settings}, **changes)


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    grown = np.exp(logits - logits.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


def _logits(client: Training, images: torch.Tensor, prefix: str) -> NDArray[np.float64]:
    with torch.no_grad():
        z = client.modules[f"{prefix}projector"](client.modules[f"{prefix}encoder"](images)).double().numpy()
        w = client.modules[f"{prefix}prototypes"].weight.double().numpy()
    return _unit(z) @ _unit(w).T


def test_prototypes_are_compared_by_their_cosine() -> None:
    """z = (3, 4), w = (0, 2) and (-5, 0) have the cosines 4/5 and -3/5."""
    layer = Prototypes(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 2.0], [-5.0, 0.0]]))
    torch.testing.assert_close(layer(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.8, -0.6]]))


def test_the_loss_is_that_of_algorithm_1() -> None:
    """Compute it again in float64: both pairs of different views, with a center other than 0 and another teacher."""
    client = training(_spec(student_temperature=0.2, teacher_temperature=0.05, temperature_warmup_rounds=0))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        center(client.modules).current.normal_(std=0.1, generator=generator)
        for parameter in client.modules["teacher_encoder"].parameters():
            parameter.mul_(1.1)
    batch = client.batch()
    images, c = torch.cat(batch.views), center(client.modules).current.double().numpy()
    s1, s2 = np.split(_logits(client, images, ""), 2)
    t1, t2 = np.split(_logits(client, images, "teacher_"), 2)
    expected = 0.0
    for t, s in ((t1, s2), (t2, s1)):
        p, q = _softmax((t - c) / 0.05), _softmax(s / 0.2)
        expected += -(p * np.log(q)).sum(axis=1).mean() / 2
    assert client.values(batch)["dino"] == pytest.approx(expected, rel=1e-4)


def test_the_center_is_the_moving_average_of_the_teachers_mean() -> None:
    client = training(_spec(center_momentum=0.7))
    batch = client.batch()
    with torch.no_grad():
        center(client.modules).current.fill_(0.5)
    mean = _logits(client, torch.cat(batch.views), "teacher_").mean(axis=0)
    client.terms(batch)
    client.algorithm.start_steps(client.modules, Schedule(1, 4, 0.1), client.ctx)
    client.algorithm.after_step(client.modules, client.ctx)
    found = center(client.modules).current.double().numpy()
    np.testing.assert_allclose(found, 0.7 * 0.5 + 0.3 * mean, rtol=1e-4, atol=1e-5)
    assert float(center(client.modules).num_logits) == 0


def test_micro_batches_move_the_center_once() -> None:
    """The encoder has GroupNorm, so that the teacher's logits of an image do not depend on its part."""
    found = []
    for parts in (1, 4):
        values = _spec({"batch_size": 32, "num_micro_batches": parts}).model_dump(mode="json")
        values["model"] |= {"encoder": {"widths": [8, 16], "norm": "group"}}
        values["model"]["projector"]["batch_norm"] = False
        client = training(RunSpec.model_validate(values))
        client.algorithm.start_steps(client.modules, Schedule(1, 4, 0.1), client.ctx)
        optimizer = torch.optim.SGD(client.modules.parameters(), lr=0.1)
        eager_step(client.algorithm, client.modules, optimizer, client.ctx)(client.batch())
        found.append((center(client.modules).current, client.modules["encoder"].blocks[0].conv.weight.detach()))
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)


def test_the_teacher_follows_with_a_momentum_that_grows_to_1() -> None:
    client = training(_spec(target_momentum=0.9), number=2)
    modules = client.modules
    client.algorithm.start_steps(modules, Schedule(num_epochs=1, steps_per_epoch=2, learning_rate=0.1), client.ctx)
    student, teacher = prototypes(modules).weight, modules["teacher_prototypes"].weight
    expected = teacher.detach().double().clone()
    for step in range(2):
        with torch.no_grad():
            student.add_(1.0)
        client.terms(client.batch())
        client.algorithm.after_step(modules, client.ctx)
        momentum = 1 - 0.1 * (1 + math.cos(math.pi * (1 + step / 2) / 2)) / 2
        expected = momentum * expected + (1 - momentum) * student.detach().double()
    torch.testing.assert_close(teacher.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_the_teachers_temperature_follows_dinos_schedule_with_rounds_for_epochs() -> None:
    config = FedDINOConfig()
    found = [config.teacher_temperature_in(number) for number in range(1, 51)]
    np.testing.assert_allclose(found, np.concatenate([np.linspace(0.04, 0.07, 30), np.full(20, 0.07)]))
    assert FedDINOConfig(temperature_warmup_rounds=1).teacher_temperature_in(1) == 0.04
    assert FedDINOConfig(temperature_warmup_rounds=0).teacher_temperature_in(1) == 0.07
    client = training(_spec(temperature_warmup_rounds=3), number=2)
    assert float(center(client.modules).temperature) == pytest.approx(0.055)


@pytest.mark.parametrize(("number", "moves"), [(1, False), (2, True)])
def test_prototypes_are_frozen_in_the_first_round(number: int, moves: bool) -> None:  # noqa: FBT001
    spec = _spec(num_frozen_rounds=1)
    first = start(spec).broadcast
    found = local_round(spec, first, number=number)
    assert torch.equal(found.update["prototypes.weight"], first["prototypes.weight"]) != moves
    assert not torch.equal(found.update["encoder.blocks.0.conv.weight"], first["encoder.blocks.0.conv.weight"])


def test_the_student_is_sent_and_teacher_and_center_are_kept() -> None:
    spec = _spec()
    first = start(spec)
    result = local_round(spec, first.broadcast)
    assert {name.split(".")[0] for name in result.update} == {"encoder", "projector", "prototypes"}
    kept = {name.split(".")[0] for name in result.state}
    assert kept == {"teacher_encoder", "teacher_projector", "teacher_prototypes", "center"}
    assert float(result.state["center.current"].abs().max()) > 0
    again = local_round(spec, first.broadcast, number=2, state=result.state)
    cold = local_round(spec, first.broadcast, number=2)
    assert any(not torch.equal(again.update[name], cold.update[name]) for name in cold.update)


def test_a_client_without_state_starts_with_the_student_as_its_teacher() -> None:
    client = training(_spec())
    for name in ("encoder", "projector", "prototypes"):
        own, teacher = client.modules[name].state_dict(), client.modules[f"teacher_{name}"].state_dict()
        assert all(torch.equal(own[key], teacher[key]) for key in own)
    assert float(center(client.modules).current.abs().max()) == 0


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    "parts",
    [
        {"add_ons": [{"name": "dsr"}, {"name": "decorrelation"}, {"name": "fur"}]},
        {"add_ons": [{"name": "proximal"}, {"name": "fedx"}], "reducer": {"name": "ldawa"}},
        {"add_ons": [{"name": "fedx", "local_contrastive": 0}]},
        {"merge": {"name": "ema"}, "add_ons": [{"name": "scaffold"}]},
        {"merge": {"name": "local"}, "reducer": {"name": "none"}},
    ],
)
def test_feddino_trains_with_the_other_parts(parts: dict[str, Any]) -> None:
    spec = _spec(**parts)
    result = simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())


def test_feddino_trains_without_a_projector() -> None:
    values = _spec().model_dump(mode="json")
    values["model"]["projector"] = None
    spec = RunSpec.model_validate(values)
    assert {name.split(".")[0] for name in start(spec).broadcast} == {"encoder", "prototypes"}
    assert "dino" in training(spec).values(training(spec).batch())
    result = simulate(spec, shards(spec))
    kept = {name.split(".")[0] for name in result.client_states["client-0"]}
    assert kept == {"teacher_encoder", "teacher_prototypes", "center"}


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"add_ons": [{"name": "hsd", "variant": "mask"}]}, "compares them with something else"),
        ({"add_ons": [{"name": "crossed_kl"}]}, "does not have both"),
        ({"merge": {"name": "dapu"}}, "does not have one"),
        ({"reducer": {"name": "distillation"}}, "feddino shares more than these"),
    ],
)
def test_unsupported_parts_are_refused(parts: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        _spec(**parts)


CROPS = {"num_crops": 3, "image_size": 4, "min_scale": 0.1, "max_scale": 0.4}
DATA = {"channels": 1, "image_size": 8}


def test_local_crops_are_smaller_views_of_the_same_images() -> None:
    plain, cropped = (training(method_spec("feddino", data=DATA | more)) for more in ({}, {"local_crops": CROPS}))
    first, second = plain.batch(), cropped.batch()
    assert [view.shape for view in second.local_views] == [(32, 1, 4, 4)] * 3
    assert all(torch.equal(one, other) for one, other in zip(first.views, second.views, strict=True))
    assert first.local_views == ()
    assert not torch.equal(second.local_views[0], second.local_views[1])


def test_the_student_also_predicts_the_teacher_from_local_crops() -> None:
    """Two views of the teacher and five of the student: 2 * 5 - 2 pairs of different views, in float64."""
    method = {"name": "feddino", "num_prototypes": 16, "teacher_temperature": 0.05, "temperature_warmup_rounds": 0}
    client = training(method_spec("feddino", method=method, data={**DATA, "local_crops": CROPS}))
    batch = client.batch()
    teachers = np.split(_logits(client, torch.cat(batch.views), "teacher_"), 2)
    students = np.split(_logits(client, torch.cat(batch.views), ""), 2)
    students += np.split(_logits(client, torch.cat(batch.local_views), ""), 3)
    expected = 0.0
    for u, t in enumerate(teachers):
        for v, s in enumerate(students):
            if u != v:
                expected += -(_softmax(t / 0.05) * np.log(_softmax(s / 0.1))).sum(axis=1).mean() / 8
    assert client.values(batch)["dino"] == pytest.approx(expected, rel=1e-4)


def test_a_run_can_be_continued_only_with_a_constant_momentum() -> None:
    with pytest.raises(ValueError, match="would be different over 5"):
        _spec().continued(5)
    assert _spec(target_momentum_schedule="constant").continued(5).num_rounds == 5
