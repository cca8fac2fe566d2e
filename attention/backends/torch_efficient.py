"""torch's memory-efficient (CUTLASS) kernel with cu_seqlens: tensor cores from 7.0. Its adapter is not here yet."""

from __future__ import annotations

from vlm.attention.capability import ANY_DTYPE, Backend, Capability, HeadDim

BACKEND = Backend(
    name="torch_efficient",
    summary="torch's memory-efficient kernel over packed sequences",
    op="vlm.attention.backends.torch_efficient_op:construct",
    capability=Capability(
        roles=frozenset({"encoder", "cross"}),
        dtypes=ANY_DTYPE,
        head_dim=HeadDim(multiple_of=8),
        features=frozenset({"varlen", "causal", "sliding_window"}),
        platforms={"cuda": (7, 0)},
        unavailable="kernels: not in this version",
    ),
)
