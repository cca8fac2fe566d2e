"""Our own Triton kernels, for every role: packed, paged, decode (vlm.kernels)."""

from __future__ import annotations

from vlm.attention.capability import ANY_DTYPE, Backend, Capability, HeadDim
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec
from vlm.kernels.tiles import Refusal, Tile, decode_tile, flash_tile


def tiles_of(spec: AttentionSpec, platform: Platform) -> tuple[Tile | Refusal, ...]:
    """Every tile that a layer group needs: (packed, short) for the encoder and cross-attention, else (packed, paged,
    decode)."""
    dtype, head_dim = spec.dtype, spec.head_dim
    packed = flash_tile(platform, dtype, head_dim)
    if spec.role != "decoder":
        return packed, flash_tile(platform, dtype, head_dim, max_q=1)
    kv_dtype = spec.kv_cache_dtype
    group = spec.num_heads // spec.num_kv_heads
    return (
        packed,
        flash_tile(platform, dtype, head_dim, paged=True, kv_dtype=kv_dtype),
        decode_tile(platform, dtype, head_dim, group, kv_dtype=kv_dtype),
    )


def _check(spec: AttentionSpec, platform: Platform) -> list[str]:
    """What is no data: a tile that does not fit, with its numbers; spans outside of a decoder."""
    if spec.role != "decoder" and "image_spans" in spec.features:
        return ["feature:image_spans (of a decoder's prompt only)"]
    return list(dict.fromkeys(tile.reason for tile in tiles_of(spec, platform) if isinstance(tile, Refusal)))


BACKEND = Backend(
    name="triton",
    summary="our own Triton kernels",
    package="triton",
    op="vlm.attention.backends.triton_op:construct",
    capability=Capability(
        roles=frozenset({"encoder", "decoder", "cross"}),
        dtypes=ANY_DTYPE,
        head_dim=HeadDim(maximum=256, minimum=32, multiple_of=8),
        head_dim_by_role={"decoder": HeadDim(maximum=256, minimum=32, multiple_of=8, also=(512,))},
        features=frozenset({"varlen", "causal", "paged", "sliding_window", "softcap", "sinks", "image_spans"}),
        platforms={"cuda": (7, 5), "rocm": None, "xpu": None},
        kv_dtypes={"float8_e4m3fn": (8, 9)},
        check=_check,
        minimum_version="3.6",
    ),
)
