"""torch's memory-efficient (CUTLASS) kernel with cu_seqlens: tensor cores from 7.0.

Its windows are not declared: rows whose first tile of keys lies outside of theirs come out as NaN
(ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h guards that case for biases only).
Nor is causal cross-attention: in batches with a sequence of more queries than keys, rows that see keys came out wrong
on an H200 (torch 2.11). A decoder never has such a sequence.
"""

from __future__ import annotations

from vlm.attention.capability import ANY_DTYPE, Backend, Capability, HeadDim
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec


def _check(spec: AttentionSpec, _platform: Platform) -> list[str]:
    """Causal holds where no sequence has more queries than keys; cross-attention promises nothing of the kind."""
    if spec.role == "cross" and "causal" in spec.features:
        return ["feature:causal (not in cross-attention, whose queries may outnumber the keys)"]
    return []


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
        check=_check,
    ),
)
