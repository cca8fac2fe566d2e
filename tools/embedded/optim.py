"""Muon for the matrices, AdamW for everything else.

Muon (Jordan 2024) replaces a matrix's momentum by its nearest orthogonal matrix, here with the scale of Liu et al. 2025
("Muon is scalable"), 0.2 sqrt(longer side), so that one learning rate serves both optimisers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration in the reference


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration on a batch of matrices (M, R, C), in bf16 on a GPU (many CPUs are slow at that)."""
    a, b, c = COEFFICIENTS
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon:
    """Muon over matrices grouped by shape."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.05) -> None:
        self.groups: list[list[nn.Parameter]] = []
        for shape in sorted({tuple(p.shape) for p in params}):
            self.groups.append([p for p in params if tuple(p.shape) == shape])
        self.momentum, self.decay = momentum, decay
        self.state = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, lr: Tensor) -> None:
        for group, buffer in zip(self.groups, self.state, strict=True):
            grad = torch.stack([p.grad for p in group if p.grad is not None])
            buffer.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(buffer, self.momentum)) * (0.2 * max(group[0].shape) ** 0.5)
            for p, u in zip(group, update, strict=True):
                p.mul_(1 - lr * self.decay).sub_(lr * u)


class Optimiser:
    """Both, with one learning rate and one call a step."""

    def __init__(self, model: nn.Module, decay: float = 0.05) -> None:
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, p in model.named_parameters():
            matrix = p.ndim == 2 and "embed" not in name and "patch_head" not in name
            (matrices if matrix else rest).append(p)
        self.muon = Muon(matrices, decay=decay)
        fused = rest[0].is_cuda
        self.lr = torch.zeros((), device=rest[0].device)
        groups = [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            groups, lr=torch.tensor(0.0) if not fused else self.lr, betas=(0.9, 0.98), fused=fused
        )
        self.all = [*matrices, *rest]

    def step(self, lr: float) -> None:
        """One update from the gradients, clipped to norm 1 for AdamW's share; then clears them."""
        self.lr.fill_(lr)
        for group in self.adam.param_groups:
            group["lr"].fill_(lr)
        torch.nn.utils.clip_grad_norm_(self.all, 1.0)
        self.muon.step(self.lr)
        self.adam.step()
        for p in self.all:
            p.grad = None
