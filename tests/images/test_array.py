"""Arrays and tensors: converted by the written rule, or refused with the shape in the message."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vlm.errors import ImageDecodeError
from vlm.images import Image, load_image, read_size


def loaded(source: object) -> np.ndarray:
    return np.asarray(load_image(source).image)


def test_height_one_is_not_channels_first() -> None:
    array = np.arange(3000, dtype=np.uint32).astype(np.uint8).reshape(1, 1000, 3)
    assert read_size(array) == (1000, 1)
    np.testing.assert_array_equal(loaded(array), array)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1)])
def test_grey(shape: tuple[int, ...]) -> None:
    array = np.arange(35, dtype=np.uint8).reshape(shape)
    np.testing.assert_array_equal(loaded(array), np.repeat(array.reshape(5, 7, 1), 3, axis=2))


def test_rgba_is_composited() -> None:
    array = np.zeros((2, 2, 4), np.uint8)
    array[0] = (9, 9, 9, 255)
    np.testing.assert_array_equal(loaded(array)[:, 0], [[9, 9, 9], [255, 255, 255]])


def test_boolean_is_black_and_white() -> None:
    np.testing.assert_array_equal(loaded(np.array([[True, False]]))[0, :, 0], [255, 0])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_floats_within_0_and_1(kind: type) -> None:
    array = np.linspace(0, 1, 256, dtype=kind).reshape(1, 256)
    np.testing.assert_allclose(loaded(array)[0, :, 0], np.arange(256), atol=1 if kind is np.float16 else 0)


@pytest.mark.parametrize("bad", [-0.5, 1.5, 255.0, np.nan, np.inf])
def test_floats_outside_0_and_1_are_refused_with_their_range(bad: float) -> None:
    array = np.zeros((3, 4, 3), np.float32)
    array[1, 1, 1] = bad
    with pytest.raises(ImageDecodeError, match=r"shape \(3, 4, 3\) and type float32 .*floats must lie within 0\.\.1"):
        load_image(array)


def test_a_tensor_without_values_is_refused() -> None:
    for tensor in (torch.empty(4, 4, 3, device="meta"), torch.eye(4).to_sparse()):
        with pytest.raises(ImageDecodeError, match="a Tensor cannot be read as an array"):
            load_image(tensor)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "complex64", "object", "<U3"])
def test_other_types_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(ImageDecodeError, match=r"shape \(3, 4, 3\)"):
        load_image(np.zeros((3, 4, 3), dtype))


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((3, 20, 30), "channels first|channels come first"),
        ((4, 20, 30), "channels come first"),
        ((2, 20, 30, 3), "a batch"),
        ((20, 30, 2), "must be"),
        ((20, 30, 5), "must be"),
        ((20,), "must be"),
        ((), "must be"),
        ((0, 30, 3), "no pixels"),
        ((20, 0), "no pixels"),
    ],
)
def test_other_shapes_are_refused_with_the_shape(shape: tuple[int, ...], hint: str) -> None:
    with pytest.raises(ImageDecodeError, match=hint) as caught:
        load_image(np.zeros(shape, np.uint8))
    assert str(shape) in str(caught.value)


def test_channels_first_by_saying_so() -> None:
    array = np.random.default_rng(0).integers(0, 256, (3, 5, 7), dtype=np.uint8)
    np.testing.assert_array_equal(loaded(Image.from_array(array, channels="first")), array.transpose(1, 2, 0))
    np.testing.assert_array_equal(loaded(Image.from_array(array.transpose(1, 2, 0))), array.transpose(1, 2, 0))
    assert read_size(Image.from_array(array, channels="first")) == (7, 5)


def test_from_array_refuses_at_once() -> None:
    with pytest.raises(ImageDecodeError, match=r"\(20, 30, 2\)"):
        Image.from_array(np.zeros((2, 20, 30), np.uint8), channels="first")
    with pytest.raises(ImageDecodeError, match=r"\(C, H, W\)"):
        Image.from_array(np.zeros((20, 30), np.uint8), channels="first")
    with pytest.raises(ImageDecodeError, match='"first" or "last"'):
        Image.from_array(np.zeros((20, 30), np.uint8), channels="middle")  # type: ignore[arg-type]
    with pytest.raises(ImageDecodeError, match="type int64"):
        Image.from_array([[1, 2]])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32, torch.float16, torch.bfloat16])
def test_tensors(dtype: torch.dtype, device: str) -> None:
    tensor = torch.ones(4, 6, 3, device=device).to(dtype)
    expected = 1 if dtype == torch.uint8 else 255
    assert (loaded(tensor) == expected).all()
    if dtype.is_floating_point:
        assert (loaded(tensor.requires_grad_()) == 255).all()


def test_views_and_read_only_arrays() -> None:
    array = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    array.flags.writeable = False
    np.testing.assert_array_equal(loaded(array[::-2, ::2]), array[::-2, ::2])
