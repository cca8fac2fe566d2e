"""torch's memory-efficient (CUTLASS) kernel with cu_seqlens: tensor cores from 7.0.

Its windows are not declared: rows whose first tile of keys lies outside of theirs come out as NaN
(ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h guards that case for biases only).
"""

from __future__ import annotations

from vlm.attention.capability import ANY_DTYPE, Backend, Capability, HeadDim

BACKEND = Backend(
    name="torch_efficient",
    summary="torch's memory-efficient kernel over packed sequences",
    op="vlm.attention.backends.torch_efficient_op:construct",
    capability=Capability(
        roles=frozenset({"encoder", "decoder", "cross"}),
        dtypes=ANY_DTYPE,
        head_dim=HeadDim(minimum=8, multiple_of=8),
        features=frozenset({"varlen", "causal", "paged"}),
        platforms={"cuda": (7, 0)},
    ),
)
