"""The upstream FlashAttention packages: one backend, four providers, tried best first for the chip.

What each provides was read from its sources: flash-attn-4 4.0.0b36 (`flash_attn/cute/interface.py`), fa3-fwd 0.0.3
(its build flags), FlashAttention's `hopper/` and its changelog for 2.x. Every provider reads packed keys; only the
full FlashAttention-3 is given the paged cache itself, since it takes blocks of any size (2.x wants multiples of 256,
fa3-fwd is built without paging).
"""

from __future__ import annotations

from vlm.attention.capability import HALF, Backend, Capability, HeadDim, Provider
from vlm.attention.platform import Platform
from vlm.attention.spec import Feature, Role

_ROLES: frozenset[Role] = frozenset({"encoder", "decoder", "cross"})
_BASE: frozenset[Feature] = frozenset({"varlen", "causal", "paged"})
_WINDOW_SOFTCAP: frozenset[Feature] = _BASE | {"sliding_window", "softcap"}


FA4 = Provider(
    "flash_attn.cute",
    "FlashAttention-4",
    "pip install 'vlm-runtime[fa4]'",
    Capability(
        roles=_ROLES,
        dtypes=HALF,
        head_dim=HeadDim(maximum=256, minimum=8, multiple_of=8),
        features=_WINDOW_SOFTCAP | {"sinks"},
        platforms={"cuda": (9, 0)},
        majors=(9, 10, 11),  # its README: Hopper and data-centre Blackwell
        check=lambda spec, platform: _fa4_head_dim(spec.head_dim, platform),
        minimum_version="4.0.0",
    ),
)
FA3 = Provider(
    "flash_attn_interface",
    "FlashAttention-3",
    "build the hopper/ folder of FlashAttention's repository",
    Capability(
        roles=_ROLES,
        dtypes=HALF,
        head_dim=HeadDim(maximum=256, minimum=8, multiple_of=8),
        features=_WINDOW_SOFTCAP,
        platforms={"cuda": (9, 0)},
        majors=(9,),
    ),
)
FA3_FWD = Provider(
    "fa3_fwd_interface",
    "FlashAttention-3 forward",
    "pip install 'vlm-runtime[fa3]'",
    Capability(
        roles=_ROLES,
        dtypes=frozenset({"bfloat16"}),  # FLASHATTENTION_DISABLE_FP16
        head_dim=HeadDim(maximum=256, minimum=8, multiple_of=8),
        features=_BASE | {"softcap"},  # FLASHATTENTION_DISABLE_LOCAL: no window
        platforms={"cuda": (9, 0)},
        majors=(9,),
    ),
)
FA2 = Provider(
    "flash_attn",
    "FlashAttention-2",
    "pip install 'vlm-runtime[flash-attn]'",
    Capability(
        roles=_ROLES,
        dtypes=HALF,
        head_dim=HeadDim(maximum=256, minimum=8, multiple_of=8),
        features=_WINDOW_SOFTCAP,
        platforms={"cuda": (8, 0)},
        minimum_version="2.5",
        feature_versions={"softcap": "2.6"},
    ),
)


def _fa4_head_dim(head_dim: int, platform: Platform) -> list[str]:
    """Blackwell kernels of FlashAttention-4 exist up to 128, and for 256 alone; Hopper's go up to 256."""
    if platform.capability is not None and platform.capability[0] >= 10 and 128 < head_dim < 256:
        return [f"head_dim: {head_dim} is above 128 and not 256"]
    return []


def order(platform: Platform) -> tuple[Provider, ...]:
    """Providers for a chip, best first."""
    major = platform.capability[0] if platform.capability else 0
    if major == 9:
        return FA3, FA3_FWD, FA4, FA2
    if major in {10, 11}:
        return FA4, FA2
    return (FA2,)


BACKEND = Backend(
    name="flash_attn",
    summary="the upstream FlashAttention package: FA4, FA3, FA3 forward or FA2",
    op="vlm.attention.backends.flash_attn_op:construct",
    capability=Capability(
        roles=_ROLES,
        dtypes=HALF,
        head_dim=HeadDim(maximum=256, minimum=8, multiple_of=8),
        features=_WINDOW_SOFTCAP | {"sinks"},
        platforms={"cuda": (8, 0)},
    ),
    providers=(FA4, FA3, FA3_FWD, FA2),
    order=order,
)
