"""`torch.nn.attention.varlen`: the FlashAttention-2 that torch is built with, over packed sequences.

Paged caches are gathered into packed keys first, on every torch version. Releases from 2.12 take a block_table, but
only in blocks of 256 tokens, and with split-KV they leave all sequences after the first unwritten
(pytorch/pytorch#194167).
"""

from __future__ import annotations

from vlm.attention.capability import HALF, Backend, Capability, HeadDim

BACKEND = Backend(
    name="torch_varlen",
    summary="FlashAttention-2 inside torch",
    op="vlm.attention.backends.torch_varlen_op:construct",
    capability=Capability(
        roles=frozenset({"encoder", "decoder", "cross"}),
        dtypes=HALF,
        head_dim=HeadDim(maximum=256, minimum=8, multiple_of=8),
        features=frozenset({"varlen", "causal", "paged", "sliding_window"}),
        platforms={"cuda": (8, 0)},
        # 2.10 and before: no scale, no window, causal under another name.
        minimum_version="2.11",
    ),
)
