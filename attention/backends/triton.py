"""Our own Triton kernels, for every role. They are not here yet: the declaration is what they are to do."""

from __future__ import annotations

from vlm.attention.capability import ANY_DTYPE, Backend, Capability, HeadDim

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
        unavailable="kernels: not in this version",
    ),
)
