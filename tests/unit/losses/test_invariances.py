"""Properties of every loss: precision, scale, order, which inputs get a gradient, and finite values."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fedssl import losses
from fedssl.losses import (
    alignment,
    assignment_divergence,
    barlow_twins,
    byol_regression,
    cluster_assignment,
    cross_model_contrast,
    cross_view_info_nce,
    crossed_kl,
    decorrelation,
    dimension_scaled,
    dino,
    flexible_uniform_regularizer,
    info_nce,
    masked_reconstruction,
    multi_crop_nt_xent,
    negative_cosine,
    nt_xent,
    projector_distillation,
    prototype_contrast,
    proximal,
    relational_divergence,
    similarity_distillation,
    student_t_assignment,
    tangent_sliced_wasserstein,
    uniformity,
    vicreg,
)

B, D, M = 6, 4, 3


@dataclass(frozen=True)
class Case:
    """A loss and the roles of its inputs (by position)."""

    name: str
    loss: Callable[..., Tensor]
    inputs: tuple[tuple[int, ...], ...]
    live: tuple[int, ...]
    batched: tuple[int, ...]
    scale_free: tuple[int, ...] = ()
    soft: tuple[int, ...] = ()
    huge: float = 1e3

    def arguments(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.inputs]
        return [(x.softmax(dim=1) if i in self.soft else x).to(dtype) for i, x in enumerate(drawn)]


def _contrast_prototypes(query: Tensor, prototypes: Tensor) -> Tensor:
    clusters = torch.zeros(len(query), dtype=torch.long)
    return prototype_contrast(query, prototypes, clusters, torch.tensor([0.25, 0.5, 1.0]))


def _student_t(z: Tensor, centers: Tensor) -> Tensor:
    return student_t_assignment(z, centers).square().sum(dim=1).mean()


def _proximal(live: Tensor, reference: Tensor) -> Tensor:
    return proximal([live], [reference], 0.5)


def _regularizer(z: Tensor) -> Tensor:
    return flexible_uniform_regularizer(z, torch.Generator().manual_seed(0))


def _dimension_scaled(z: Tensor, variant: str) -> Tensor:
    return dimension_scaled(z, torch.tensor([3.0, 1.0, 1.0, 1.0]), variant=variant)  # type: ignore[arg-type]


def _three_crops(z1: Tensor, z2: Tensor, z3: Tensor) -> Tensor:
    return multi_crop_nt_xent([z1, z2, z3], 0.5)


def _dino(s1: Tensor, s2: Tensor, s3: Tensor, t1: Tensor, t2: Tensor, center: Tensor) -> Tensor:
    return dino([s1, s2, s3], [t1, t2], center, 0.5, 0.25)


Z, Q, C, S = (B, D), (5, D), (M, D), (B, M)
CASES = [
    Case("nt_xent", partial(nt_xent, temperature=0.5), (Z, Z), (0, 1), (0, 1), (0, 1)),
    Case("multi_crop_nt_xent", _three_crops, (Z, Z, Z), (0, 1, 2), (0, 1, 2), (0, 1, 2)),
    Case("info_nce", partial(info_nce, temperature=0.5), (Z, Z, Q), (0,), (0, 1), (0, 1, 2)),
    Case("cross_model_contrast", partial(cross_model_contrast, temperature=0.5), (Z, Z), (0, 1), (0, 1), (0, 1)),
    Case("cross_view_info_nce", partial(cross_view_info_nce, temperature=0.5), (Z, Z), (0, 1), (0, 1), (0, 1)),
    Case("byol_regression", byol_regression, (Z, Z), (0,), (0, 1), (0, 1)),
    Case("negative_cosine", negative_cosine, (Z, Z), (0,), (0, 1), (0, 1)),
    Case("alignment", alignment, (Z, Z), (0, 1), (0, 1), (0, 1)),
    Case("uniformity", uniformity, (Z,), (0,), (0,), (0,)),
    *(
        Case(
            f"relational_divergence-{variant}",
            partial(relational_divergence, temperature=0.5, variant=variant),
            (Z, Z, Q),
            (0, 1, 2),
            (0, 1),
            (0, 1, 2),
        )
        for variant in ("reference", "paper")
    ),
    *(
        Case(f"projector_distillation-{v}", partial(projector_distillation, variant=v), (Z, Z), (0, 1), (0, 1))
        for v in ("reference", "paper", "mse")
    ),
    *(
        Case(
            f"similarity_distillation-{variant}",
            partial(similarity_distillation, temperature=0.5, variant=variant),
            (Z, C, S),
            (0,),
            (0, 2),
            (0, 1),
            soft=(2,),
        )
        for variant in ("reference", "paper")
    ),
    Case(
        "dimension_scaled-reference",
        partial(_dimension_scaled, variant="reference"),
        (Z,),
        (0,),
        (0,),
        (0,),
    ),
    Case("dimension_scaled-paper", partial(_dimension_scaled, variant="paper"), (Z,), (0,), (0,)),
    Case("student_t_assignment", _student_t, (Z, C), (0, 1), (0,)),
    Case("assignment_divergence", assignment_divergence, (S, S), (0, 1), (0, 1), soft=(0, 1)),
    Case("crossed_kl", crossed_kl, (S, S, S, S), (0, 1), (0, 1, 2, 3), soft=(0, 1, 2, 3)),
    Case("cluster_assignment", partial(cluster_assignment, temperature=0.5), (Z, Z, C), (0,), (0, 1), (0, 1)),
    Case("prototype_contrast", _contrast_prototypes, (Z, C), (0,), (0,), (0, 1)),
    Case("tangent_sliced_wasserstein", tangent_sliced_wasserstein, (Z, Z, Q, (5, 2, D)), (0,), (0,), (0, 1, 2)),
    Case("flexible_uniform_regularizer", _regularizer, (Z,), (0,), (0,), (0,)),
    *(Case(f"decorrelation-{v}", partial(decorrelation, variant=v), (Z,), (0,), (0,)) for v in ("reference", "paper")),
    Case("proximal", _proximal, (Z, Z), (0,), (0, 1)),
    Case("dino", _dino, (Z, Z, Z, Z, Z, (D,)), (0, 1, 2), (0, 1, 2, 3, 4)),
    *(
        # Its gradient grows with the cube of the embeddings: at 1000 the true gradient exceeds float16.
        Case(f"vicreg-{v}", partial(vicreg, variant=v), (Z, Z), (0, 1), (0, 1), huge=10)
        for v in ("reference", "paper")
    ),
    Case("barlow_twins", barlow_twins, (Z, Z), (0, 1), (0, 1)),
    *(
        Case(
            f"masked_reconstruction-{'normalized' if normalize else 'raw'}",
            partial(masked_reconstruction, normalize=normalize),
            ((B, M, D), (B, M, D), S),
            (0,),
            (0, 1, 2),
            soft=(2,),
        )
        for normalize in (True, False)
    ),
]


def each_case_but(*names: str) -> pytest.MarkDecorator:
    kept = [case for case in CASES if case.name.partition("-")[0] not in names]
    return pytest.mark.parametrize("case", kept, ids=lambda case: case.name)


each_case = each_case_but()


def test_every_loss_has_a_case() -> None:
    no_losses = {"target_distribution", "prototype_concentrations", "dino_center"}
    assert {case.name.partition("-")[0] for case in CASES} == set(losses.__all__) - no_losses


@each_case
def test_every_loss_is_a_finite_scalar(case: Case) -> None:
    value = case.loss(*case.arguments())
    assert value.shape == ()
    assert value.isfinite()


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_losses_are_computed_in_at_least_single_precision(case: Case, dtype: torch.dtype) -> None:
    arguments = case.arguments(dtype)
    value = case.loss(*arguments)
    exact = case.loss(*(argument.double() for argument in arguments))
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    if case.name != "flexible_uniform_regularizer":  # its random numbers depend on the dtype
        torch.testing.assert_close(value.double(), exact, rtol=2e-5, atol=2e-6)


@each_case
def test_autocast_does_not_change_the_value(case: Case) -> None:
    arguments = case.arguments(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = case.loss(*arguments)
    assert torch.equal(value, case.loss(*arguments))


@each_case_but("flexible_uniform_regularizer")  # draws from a real generator; see tangent_sliced_wasserstein
def test_losses_do_not_synchronise_with_the_device(case: Case) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):  # raises if Python needs a tensor's value
        value = case.loss(*(torch.empty(shape, dtype=torch.float32) for shape in case.inputs))
    assert value.shape == ()


@each_case
def test_the_order_of_the_batch_does_not_matter(case: Case) -> None:
    arguments = case.arguments()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = [x[order] if i in case.batched else x for i, x in enumerate(arguments)]
    torch.testing.assert_close(case.loss(*permuted), case.loss(*arguments), rtol=1e-10, atol=1e-14)


@each_case
def test_losses_that_normalise_ignore_the_lengths_of_rows(case: Case) -> None:
    arguments = case.arguments()
    value = case.loss(*arguments)
    for i in case.scale_free:
        lengths = torch.linspace(0.1, 30, len(arguments[i]), dtype=torch.float64)[:, None]
        scaled = [x * lengths if j == i else x for j, x in enumerate(arguments)]
        torch.testing.assert_close(case.loss(*scaled), value, rtol=1e-10, atol=1e-14)


@each_case
def test_only_the_declared_inputs_get_a_gradient(case: Case) -> None:
    arguments = [x.requires_grad_() for x in case.arguments()]
    gradients = torch.autograd.grad(case.loss(*arguments), arguments, allow_unused=True)
    for i, gradient in enumerate(gradients):
        if i in case.live:
            assert gradient is not None
            assert gradient.abs().max() > 0
        else:
            assert gradient is None


@each_case_but("dimension_scaled")  # its target is a stopped function of the input: see test_subspace
def test_the_gradient_is_that_of_the_value(case: Case) -> None:
    arguments = case.arguments(seed=1)
    for i in case.live:
        arguments[i].requires_grad_()
    assert torch.autograd.gradcheck(case.loss, arguments, eps=1e-6, atol=1e-6, rtol=1e-5)


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", ["zero", "equal", "mixed", "huge"])
def test_degenerate_rows_give_finite_values_and_gradients(case: Case, dtype: torch.dtype, rows: str) -> None:
    arguments = []
    for i, x in enumerate(case.arguments(dtype)):
        if i in case.soft or x.ndim != 2:
            arguments.append(x)
        elif rows == "mixed":
            arguments.append(torch.cat([x[:1] * 0, x[1:2], x[1:2], x[3:]]))
        else:
            arguments.append({"zero": x * 0, "equal": x[:1].expand_as(x), "huge": x * case.huge}[rows].clone())
    live = [arguments[i].requires_grad_() for i in case.live]
    value = case.loss(*arguments)
    assert value.isfinite()
    for gradient in torch.autograd.grad(value, live):
        assert gradient.isfinite().all()


@each_case
def test_a_row_of_zeros_that_is_normalised_gets_no_gradient(case: Case) -> None:
    arguments = case.arguments(torch.float32)
    for i in set(case.live) & set(case.scale_free):
        zeroed = [x.clone() for x in arguments]
        zeroed[i][0] = 0
        zeroed[i].requires_grad_()
        (gradient,) = torch.autograd.grad(case.loss(*zeroed), zeroed[i])
        assert gradient[0].abs().max() == 0


@each_case_but("proximal", "masked_reconstruction")  # the one takes weights of any shape, the other patches
def test_a_vector_and_an_empty_batch_are_refused(case: Case) -> None:
    arguments = case.arguments()
    with pytest.raises(ValueError, match="must be a matrix with rows and columns"):
        case.loss(arguments[0][0], *arguments[1:])
    with pytest.raises(ValueError, match="must be a matrix with rows and columns"):
        case.loss(arguments[0][:0], *arguments[1:])
