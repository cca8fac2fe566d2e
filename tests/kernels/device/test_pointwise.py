"""Norm, gate and rotary kernels agree with their twins."""

from __future__ import annotations

import pytest
import torch

from vlm.kernels import activation, norm, ops, rotary
from vlm.kernels.paged import write_kv_reference


def close(ours: torch.Tensor, expected: torch.Tensor, tolerance: float, *, relative: bool = False) -> None:
    atol = tolerance * float(expected.abs().max()) if relative else tolerance
    torch.testing.assert_close(ours.float(), expected.float(), atol=atol, rtol=0.0)


@pytest.mark.parametrize("channels", [48, 576, 1000])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(device: str, dtype: torch.dtype, channels: int, offset: float) -> None:
    x = torch.randn(5, channels + 16, device=device).to(dtype)[:, :channels]
    weight = torch.randn(channels, device=device).to(dtype)
    ours, same = norm.rms_norm(x, weight, 1e-6, weight_offset=offset)
    assert same is x
    close(ours, norm.rms_norm_reference(x, weight, 1e-6, weight_offset=offset)[0], norm.TOLERANCE[dtype], relative=True)
    if not offset:
        close(ours, ops.rms_norm(x, weight, 1e-6), norm.TOLERANCE[dtype], relative=True)


def test_rms_norm_adds_the_residual(device: str, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(7, 320, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(320, device=device).to(dtype)
    ours = norm.rms_norm(x, weight, 1e-5, residual)
    expected = norm.rms_norm_reference(x, weight, 1e-5, residual)
    close(ours[0], expected[0], norm.TOLERANCE[dtype], relative=True)
    assert torch.equal(ours[1], expected[1])
    assert torch.equal(ours[1], x + residual)


def test_rms_norm_refuses_wrong_shapes(device: str, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 8, device=device, dtype=dtype)
    with pytest.raises(ValueError, match="weight"):
        norm.rms_norm(x, x[0, :4], 1e-6)
    with pytest.raises(ValueError, match="residual"):
        norm.rms_norm(x, x[0], 1e-6, x[:1])


@pytest.mark.parametrize("shape", [(3, 2 * 24), (2, 3, 2 * 1100), (0, 2 * 16)])
def test_silu_mul(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = 8 * torch.randn(shape, device=device).to(dtype)
    ours = activation.silu_mul(x)
    assert ours.shape == (*shape[:-1], shape[-1] // 2)
    if ours.numel():
        close(ours, activation.silu_mul_reference(x), activation.TOLERANCE[dtype], relative=True)
        close(ours, ops.silu_mul(x.float()), activation.TOLERANCE[dtype], relative=True)


def test_silu_mul_of_extreme_gates(device: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-6e4, -200.0, 0.0, 200.0, 6e4]], device=device).to(dtype)
    ours = activation.silu_mul(torch.cat((gate, torch.ones_like(gate)), -1))
    assert torch.equal(ours, gate.clamp(min=0))


POSITIONS = {
    "text": (lambda: torch.tensor([0, 3, 100_000, 7, 8, 9]), lambda frequencies: None),
    "grid": (lambda: torch.stack((torch.arange(6), 5 - torch.arange(6))), lambda f: rotary.grid_axes(f, 2)),
    "sections": (
        lambda: torch.arange(18).view(3, 6),
        lambda f: rotary.section_axes((f - 2 * (f // 3), f // 3, f // 3)),
    ),
}


def table(kind: str, frequencies: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    positions, axes = POSITIONS[kind]
    inv_freq = 10_000.0 ** (-torch.arange(frequencies) / frequencies)
    cos, sin = rotary.rotary_table(positions(), inv_freq, axes(frequencies))
    return cos.to(device), sin.to(device)


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize(("head_dim", "frequencies"), [(32, 16), (80, 40), (64, 16)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(device: str, dtype: torch.dtype, kind: str, head_dim: int, frequencies: int, interleaved: bool) -> None:
    cos, sin = table(kind, frequencies, device)
    x = torch.randn(6, 9, head_dim, device=device).to(dtype)[:, :5]
    ours = rotary.apply_rotary(x, cos, sin, interleaved=interleaved)
    expected = rotary.apply_rotary_reference(x, cos, sin, interleaved=interleaved)
    close(ours, expected, rotary.TOLERANCE[dtype])
    if not interleaved and head_dim == 2 * frequencies:
        close(ours, ops.apply_rotary(x, cos, sin), rotary.TOLERANCE[dtype])
    in_place = x.clone()
    assert rotary.apply_rotary(in_place, cos, sin, interleaved=interleaved, out_THD=in_place) is in_place
    close(in_place, expected, rotary.TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "frequencies"), [(4, 2, 32, 16), (14, 2, 80, 40), (3, 3, 64, 16)]
)
def test_rotary_with_the_write_of_the_cache(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, frequencies: int
) -> None:
    cos, sin = table("sections", frequencies, device)
    qkv = torch.randn(6, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    slots = torch.tensor([17, 0, -1, 31, 8, 5], dtype=torch.int64, device=device)
    caches = [torch.zeros(4, 8, kv_heads, head_dim, device=device, dtype=dtype) for _ in range(4)]
    ours = rotary.rotary_write_kv(q, k, v, cos, sin, caches[0], caches[1], slots)
    close(ours, rotary.apply_rotary_reference(q, cos, sin), rotary.TOLERANCE[dtype])
    write_kv_reference(rotary.apply_rotary_reference(k, cos, sin), v, caches[2], caches[3], slots)
    close(caches[0], caches[2], rotary.TOLERANCE[dtype])
    assert torch.equal(caches[1], caches[3])


def test_rotary_refuses_a_table_that_does_not_fit(device: str, dtype: torch.dtype) -> None:
    cos, sin = table("text", 16, device)
    with pytest.raises(ValueError, match="does not fit"):
        rotary.apply_rotary(torch.zeros(5, 2, 32, device=device, dtype=dtype), cos, sin)
    with pytest.raises(ValueError, match="does not fit"):
        rotary.apply_rotary(torch.zeros(6, 2, 16, device=device, dtype=dtype), cos, sin)
