"""Draws packed picture records on the GPU, and labels patches for the auxiliary loss.

Letters: B pictures, S = SIDE pixels, O objects, P patches a side, K points a patch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageDraw

from .drawing import OUTLINES
from .pool import CHARACTERS, HEAD, MAX_CHARS, OBJECTS, RECT, WIDTH
from .scenes import COLOUR_NAMES, SHAPES, SIDE

ATLAS, REACH = 96, 1.35  # texels a side of a shape's distance field, and the half width it covers at radius 1
PATCH = 12
PATCHES = SIDE // PATCH
POINTS = 3


@functools.cache
def distance_fields() -> torch.Tensor:
    """(shapes, ATLAS, ATLAS) signed distances to each outline at radius 1, negative inside."""
    centres = (torch.arange(ATLAS) + 0.5) / ATLAS * 2 * REACH - REACH
    yy, xx = torch.meshgrid(centres, centres, indexing="ij")
    grid = torch.stack([xx, yy], -1).reshape(-1, 2)
    fields = []
    for shape in SHAPES:
        image = Image.new("1", (ATLAS * 8, ATLAS * 8), 0)
        draw, best = ImageDraw.Draw(image), torch.full((len(grid),), 9.0)
        for i, path in enumerate(OUTLINES[shape]):
            draw.polygon(
                [((x + REACH) / (2 * REACH) * ATLAS * 8, (y + REACH) / (2 * REACH) * ATLAS * 8) for x, y in path],
                fill=0 if i else 1,
            )
            a = torch.tensor(path)
            ab = a.roll(-1, 0) - a
            t = (((grid[:, None] - a) * ab).sum(-1) / (ab * ab).sum(-1)).clamp(0, 1)
            best = torch.minimum(best, (grid[:, None] - a - t[..., None] * ab).norm(dim=-1).amin(1))
        filled = torch.from_numpy(np.array(image.convert("L")))
        inside = filled[4::8, 4::8].reshape(-1) > 0
        fields.append(torch.where(inside, -best, best).view(ATLAS, ATLAS))
    return torch.stack(fields)


def bilinear(
    flat: torch.Tensor, base: torch.Tensor, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, h: torch.Tensor
) -> torch.Tensor:
    """Samples of w x h images that begin at ``base`` of a flat buffer; (x, y) in pixels, centres at half."""
    x, y = x - 0.5, y - 0.5
    x0, y0 = torch.floor(x), torch.floor(y)
    fx, fy = x - x0, y - y0
    xl = torch.minimum(x0.clamp(min=0), w - 1).long()
    xr = torch.minimum((x0 + 1).clamp(min=0), w - 1).long()
    yt = torch.minimum(y0.clamp(min=0), h - 1).long()
    yb = torch.minimum((y0 + 1).clamp(min=0), h - 1).long()
    row_t, row_b = base + yt * w.long(), base + yb * w.long()
    top = flat[row_t + xl].float() * (1 - fx) + flat[row_t + xr].float() * fx
    bottom = flat[row_b + xl].float() * (1 - fx) + flat[row_b + xr].float() * fx
    return top * (1 - fy) + bottom * fy


def strip_point(head: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where seen points (x, y) lie in the text strip: turned back about its centre in natural proportions."""
    w, h, cx, cy, c, s, k = head[6:13]
    u, v = (x - cx) / k, y - cy  # natural proportions, up to one scale
    return (c * u + s * v) * k + w / 2, (c * v - s * u) + h / 2


def shape_distance(fields: torch.Tensor, obj: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Signed distance in seen pixels of points to one object a picture; ``obj``: its numbers, broadcast over points."""
    shape, cx, cy, rx, ry, c, s = obj[0], obj[4], obj[5], obj[6], obj[7], obj[8], obj[9]
    u, v = (x - cx) / rx, (y - cy) / ry
    u, v = c * u + s * v, c * v - s * u
    size = torch.full_like(u, ATLAS)
    base = shape.clamp(0, len(SHAPES) - 1).long() * ATLAS * ATLAS
    field = bilinear(fields, base, (u + REACH) / (2 * REACH) * ATLAS, (v + REACH) / (2 * REACH) * ATLAS, size, size)
    beyond = torch.maximum(u.abs(), v.abs()) - REACH
    field = torch.where(beyond > 0, field + beyond, field) * torch.sqrt(rx * ry)
    box = torch.maximum((x - cx).abs() - rx, (y - cy).abs() - ry)
    return torch.where(shape == RECT, box, torch.where(shape < 0, torch.full_like(box, 99.0), field))


def points(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    axis = torch.arange(n, device=device) + 0.5
    return axis[None, None, :], axis[None, :, None]


def backdrops(head_BH: torch.Tensor) -> torch.Tensor:
    """(B, 3, S, S) backgrounds, 0..255."""
    _, y = points(SIDE, head_BH.device)
    a, b = head_BH[:, 0:3, None, None], head_BH[:, 3:6, None, None]
    return (a + (b - a) * (y / SIDE)[:, None]).expand(-1, -1, SIDE, SIDE).contiguous()


def add_object(image: torch.Tensor, obj_BW: torch.Tensor, fields: torch.Tensor, vary: torch.Tensor) -> torch.Tensor:
    """``image`` with one object a picture over it."""
    x, y = points(SIDE, image.device)
    obj = [obj_BW[:, i, None, None] for i in range(WIDTH)]
    soft = 0.7 + 0.9 * vary[:, 0, None, None]
    alpha = (0.5 - shape_distance(fields, obj, x, y) / soft).clamp(0, 1)[:, None]
    return image + (obj_BW[:, 1:4, None, None] - image) * alpha


def add_text(image: torch.Tensor, head_BH: torch.Tensor, offsets: torch.Tensor, strips: torch.Tensor) -> torch.Tensor:
    """``image`` with its text or chart mask over it."""
    x, y = points(SIDE, image.device)
    head = [head_BH[:, i, None, None] for i in range(HEAD)]
    sx, sy = strip_point(head, x, y)
    w, h = head[6], head[7]
    inside = (sx > 0) & (sy > 0) & (sx < w) & (sy < h)
    ink = bilinear(strips, offsets[:, None, None], sx, sy, w.clamp(min=1), h.clamp(min=1)) / 255 * inside
    return image + (head_BH[:, 13:16, None, None] - image) * ink[:, None]


def photograph(image: torch.Tensor, vary: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Blur or sharpening (three pictures in ten), contrast, brightness, noise (one in two); eight bits, as -1..1."""
    amount = torch.where(vary[:, 1] < 0.3, vary[:, 2] * 1.4 - 0.4, torch.zeros_like(vary[:, 2]))[:, None, None, None]
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1), mode="replicate")
    near = padded[:, :, :-2, 1:-1] + padded[:, :, 2:, 1:-1] + padded[:, :, 1:-1, :-2] + padded[:, :, 1:-1, 2:]
    image = image + (near / 4 - image) * amount * 0.7
    gain = 1 + (vary[:, 3, None, None, None] - 0.5) * 0.12
    shift = (vary[:, 4, None, None, None] - 0.5) * 14
    level = torch.where(vary[:, 5] < 0.5, vary[:, 6] ** 2 * 14, torch.zeros_like(vary[:, 6]))[:, None, None, None]
    image = (image - 128) * gain + 128 + shift + noise * level
    return image.clamp(0, 255).round() / 127.5 - 1


def label_object(labels: torch.Tensor, obj_BW: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
    """Patch labels with one object a picture over them."""
    x, y = patch_points(labels.device)
    obj = [obj_BW[:, i, None, None, None] for i in range(WIDTH)]
    name = 1 + len(CHARACTERS) + obj[0].long() * len(COLOUR_NAMES) + obj[10].long()
    return torch.where((shape_distance(fields, obj, x, y) < 0) & (obj[0] < RECT), name, labels)


def label_text(
    labels: torch.Tensor, head_BH: torch.Tensor, first_shape: torch.Tensor, edges: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    """Patch labels with the text's characters over them; -1 (not asked) on charts."""
    x, y = patch_points(labels.device)
    head = [head_BH[:, i, None, None, None] for i in range(HEAD)]
    sx, sy = strip_point(head, x, y)
    index = (sx[..., None] >= edges[:, None, None, None, :]).sum(-1) - 1
    on_line = (index >= 0) & (index < MAX_CHARS) & ((sy - head[16]).abs() < head[17]) & (head[6] > 0)
    picked = classes.long()[:, None, None, None, :].expand(*labels.shape, MAX_CHARS)
    char = picked.gather(-1, index.clamp(0, MAX_CHARS - 1)[..., None])[..., 0]
    labels = torch.where(on_line & (char > 0), char, labels)
    return torch.where((first_shape == RECT)[:, None, None, None], torch.full_like(labels, -1), labels)


def patch_points(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seen coordinates (1, P, P, K) of the points that the labels are about."""
    corner = torch.arange(PATCHES, device=device) * PATCH
    inner = torch.tensor([2.0, 6.0, 10.0], device=device)
    x = (corner[:, None] + inner)[None, None].expand(1, PATCHES, PATCHES, POINTS)
    return x, (corner[:, None, None] + 6.0)[None].expand(1, PATCHES, PATCHES, POINTS)


class Renderer:
    """Draws and labels batches. ``optimise`` wraps each step (``torch.compile``): small functions, compiled once, which
    takes much less time than to compile one kernel over all objects."""

    def __init__(self, device: str, optimise: Callable[[Callable], Callable]) -> None:
        self.fields = distance_fields().to(device).reshape(-1)
        self.backdrops, self.add_object, self.add_text = optimise(backdrops), optimise(add_object), optimise(add_text)
        self.photograph, self.label_object, self.label_text = (
            optimise(photograph),
            optimise(label_object),
            optimise(label_text),
        )

    @torch.no_grad()
    def draw(
        self,
        records: torch.Tensor,
        offsets: torch.Tensor,
        strips: torch.Tensor,
        vary: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:
        """Pictures (B, 3, S, S) in -1..1.

        ``records`` (B, RECORD), ``offsets`` (B,) into the flat uint8 ``strips``; ``vary`` (B, 8) uniform numbers that
        choose softness, brightness, contrast and noise; ``noise`` (B, 3, S, S) standard normal.
        """
        head, objects = split(records)
        image = self.backdrops(head)
        for obj in objects:
            image = self.add_object(image, obj, self.fields, vary)
        return self.photograph(self.add_text(image, head, offsets, strips), vary, noise)

    @torch.no_grad()
    def label(self, records: torch.Tensor, edges: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """(B, P * P, K) class of what lies at K points of each patch: nothing (0), a character, or a coloured shape."""
        head, objects = split(records)
        labels = torch.zeros(len(records), PATCHES, PATCHES, POINTS, dtype=torch.long, device=records.device)
        for obj in objects:
            labels = self.label_object(labels, obj, self.fields)
        return self.label_text(labels, head, objects[0][:, 0].contiguous(), edges, classes).flatten(1, 2)


def split(records: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Head (B, HEAD) and objects, each (B, WIDTH), contiguous."""
    objects = records[:, HEAD:].view(-1, OBJECTS, WIDTH).transpose(0, 1).contiguous()
    return records[:, :HEAD].contiguous(), list(objects)
