"""Projectors: image features of the vision stack's width -> rows of the text stack's width."""

from __future__ import annotations

import torch
from torch import nn


def pixel_shuffle(x_NHWC: torch.Tensor, factor: int) -> torch.Tensor:
    """Fold factor x factor neighbours into channels: (N, h, w, C) -> (N, h/factor * w/factor, C * factor**2).

    Channels are ordered (row, column, channel) within a neighbourhood, as in Idefics3.
    """
    tiles, rows, cols, _ = x_NHWC.shape
    folded = x_NHWC.unflatten(1, (rows // factor, factor)).unflatten(3, (cols // factor, factor))
    return folded.permute(0, 1, 3, 2, 4, 5).reshape(tiles, (rows // factor) * (cols // factor), -1)


class PixelShuffleProjector(nn.Module):
    """Idefics3's connector: pixel shuffle, then one linear."""

    def __init__(self, vision_width: int, text_width: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.proj = nn.Linear(vision_width * factor**2, text_width, bias=False)

    def forward(self, x_NHWC: torch.Tensor) -> torch.Tensor:
        """(N, h, w, vision_width) -> (N, h * w / factor**2, text_width)."""
        return self.proj(pixel_shuffle(x_NHWC, self.factor))
