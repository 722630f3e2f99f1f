"""Self-distillation: a student's distribution over prototypes follows that of a teacher on other views."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.losses._embeddings import check_batch, check_positive, full_precision


def dino(
    student_VBP: Sequence[Tensor],
    teacher_VBP: Sequence[Tensor],
    center_P: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    """Return the cross-entropy between a centred, sharpened teacher and a student on different views.

        p_u = softmax((sg(t_u) - c) / t_t),  q_v = softmax(s_v / t_s)
        L = mean_{u != v} mean_i -sum_k p_u,ik log q_v,ik

    u runs over the teacher's views and v over the student's. The gradient flows into the student only.

    Args:
        student_VBP: the student's logits (B, P) of each view; at least 2 views.
        teacher_VBP: the teacher's logits of the first of these views only (with multi-crop, the global ones).
        center_P: c, which is subtracted from the teacher's logits (`dino_center`).
        student_temperature: t_s; DINO uses 0.1.
        teacher_temperature: t_t; DINO uses 0.04 to 0.07. A lower one sharpens the teacher.

    Returns:
        The mean over the batch and over all pairs of different views.

    Raises:
        ValueError: the shapes differ, or there is no pair of different views.

    Example:
        >>> import torch
        >>> views = [torch.zeros(1, 2), torch.zeros(1, 2)]
        >>> round(float(dino(views, views, torch.zeros(2), 0.1, 0.04)), 4)  # log 2
        0.6931

    Reference: DINO (Caron et al. 2021), Eq. 2 and 3, Algorithm 1.
    """
    _check_views(student_VBP, teacher_VBP, center_P)
    check_positive(student_temperature=student_temperature, teacher_temperature=teacher_temperature)
    num_students, num_teachers = len(student_VBP), len(teacher_VBP)
    fixed = [logits.detach() for logits in (*teacher_VBP, center_P)]
    with full_precision(*student_VBP, *fixed) as logits:
        *teachers, center_P = logits[num_students:]
        log_q_VBP = F.log_softmax(torch.stack(logits[:num_students]) / student_temperature, dim=2)
        p_UBP = F.softmax((torch.stack(teachers) - center_P) / teacher_temperature, dim=2)
        entropy_UV = -torch.einsum("ubp,vbp->uv", p_UBP, log_q_VBP) / len(student_VBP[0])
        same_UV = torch.eye(num_teachers, num_students, dtype=torch.bool, device=entropy_UV.device)
        return entropy_UV.masked_fill(same_UV, 0).sum() / (num_teachers * (num_students - 1))


def dino_center(center_P: Tensor, teacher_VBP: Sequence[Tensor], momentum: float) -> Tensor:
    """Return the next center: a moving average of the teacher's mean logits.

        c' = m c + (1 - m) mean_{u, i} t_u,i

    Without it, one prototype would win for all images. There is no gradient.

    Args:
        center_P: c.
        teacher_VBP: the teacher's logits (B, P) of each of its views.
        momentum: m, between 0 and 1; DINO uses 0.9.

    Returns:
        The next center (P,), in the dtype of `center_P`.

    Example:
        >>> import torch
        >>> dino_center(torch.zeros(2), [torch.tensor([[1.0, 3.0]])], momentum=0.5).tolist()
        [0.5, 1.5]

    Reference: DINO (Caron et al. 2021), Eq. 4.
    """
    _check_views((), teacher_VBP, center_P)
    if not 0 <= momentum <= 1:
        raise ValueError(f"momentum must be between 0 and 1, not {momentum}")
    with torch.no_grad(), full_precision(center_P, *teacher_VBP) as (center, *teachers):
        mean_P = torch.stack(teachers).mean(dim=(0, 1))
        return (momentum * center + (1 - momentum) * mean_P).to(center_P.dtype)


def _check_views(student_VBP: Sequence[Tensor], teacher_VBP: Sequence[Tensor], center_P: Tensor) -> None:
    students = {f"student_VBP[{v}]": logits for v, logits in enumerate(student_VBP)}
    teachers = {f"teacher_VBP[{u}]": logits for u, logits in enumerate(teacher_VBP)}
    if not teachers:
        raise ValueError("there must be at least one view of the teacher")
    check_batch(1, **students, **teachers)
    if students and (len(students) < 2 or len(teachers) > len(students)):
        raise ValueError(
            f"the student needs at least 2 views and all views of the teacher, but has {len(students)}, and the "
            f"teacher {len(teachers)}"
        )
    if center_P.shape != teacher_VBP[0].shape[1:]:
        raise ValueError(f"center_P of shape {tuple(center_P.shape)} does not fit {teacher_VBP[0].shape[1]} prototypes")
