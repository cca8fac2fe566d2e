"""The shared operators against the same thing written out."""

import pytest
import torch

from vlm.kernels.ops import apply_rotary, padded_width, rms_norm, silu_mul


def test_rms_norm_keeps_its_statistics_in_float32():
    x = torch.full((2, 512), 300.0, dtype=torch.float16)  # the square overflows float16
    out = rms_norm(x, torch.ones(512, dtype=torch.float16), 1e-6)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, torch.ones_like(out))


def test_rms_norm_matches_its_definition():
    x, weight = torch.randn(3, 5, 16), torch.randn(16)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_silu_mul_takes_the_gate_from_the_first_half():
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(silu_mul(torch.cat((gate, up), -1)), gate * torch.sigmoid(gate) * up)


def test_rotary_turns_each_pair_by_its_angle():
    x, angles = torch.randn(3, 2, 8, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    out = apply_rotary(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles)[:, None]
    torch.testing.assert_close(out, torch.cat((pairs.real, pairs.imag), -1))


def test_rotary_of_16_bit_heads_is_computed_in_float32():
    x, angles = torch.randn(64, 2, 16).bfloat16(), torch.randn(64, 8) * 1000
    out = apply_rotary(x, angles.cos(), angles.sin())
    exact = apply_rotary(x.double(), angles.double().cos(), angles.double().sin())
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize(("width", "padded"), [(3420, 3456), (8, 8), (4304, 4304), (11008, 11008), (1, 64), (65, 128)])
def test_only_widths_off_the_16_byte_boundary_are_padded(width, padded):
    assert padded_width(width) == padded
