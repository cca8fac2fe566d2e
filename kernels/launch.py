"""What the launchers of the attention kernels share: strides as kernels read them, constants of the score transform."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LOG2E = math.log2(math.e)
SPAN_RULES = {"or": 1, "and": 2}


def alignment(*tensors: torch.Tensor) -> int:
    """The largest of 16, 8, 1 that divides every stride before the last dim, which must be contiguous."""
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dim must be contiguous, strides are {tensor.stride()}")
    return next(a for a in (16, 8, 1) if all(s % a == 0 for t in tensors for s in t.stride()[:-1]))


def strides(align: int, tensor: torch.Tensor, *dims: int) -> list[int]:
    """Strides of `dims`, divided by `align`."""
    return [tensor.stride(dim) // align for dim in dims]


@dataclass(frozen=True)
class Scores:
    """scale and softcap as `flash.attend` reads them, in units of log2.

    `sign` has to be multiplied into the queries.
    """

    scale: float
    softcap: float
    sign: float

    @classmethod
    def of(cls, scale: float, softcap: float | None) -> Scores:
        """The kernels scale the largest raw score late, so the scale must be positive: its sign joins the queries."""
        sign = math.copysign(1.0, scale) if scale else 0.0
        scale = abs(scale) or 1.0
        if softcap is None:
            return cls(scale * LOG2E, 0.0, sign)
        if softcap <= 0:
            raise ValueError(f"softcap must be positive, is {softcap}")
        return cls(2.0 * LOG2E * scale / softcap, softcap * LOG2E, sign)

    def oriented(self, q_THD: torch.Tensor) -> torch.Tensor:
        """The queries, copied only where the scale is zero or negative."""
        return q_THD if self.sign == 1.0 else q_THD * self.sign


def check_spans(spans_T2: torch.Tensor | None, rule: str) -> int:
    """The kernels' number of the span rule; 0 without spans."""
    if rule not in SPAN_RULES:
        raise ValueError(f"span_rule is {rule!r}; known are {', '.join(SPAN_RULES)}")
    if spans_T2 is None:
        return 0
    if spans_T2.dtype != torch.int32 or not spans_T2.is_contiguous() or spans_T2.shape[-1] != 2:
        raise ValueError(f"spans must be contiguous int32 (T, 2), are {spans_T2.dtype} {tuple(spans_T2.shape)}")
    return SPAN_RULES[rule]
