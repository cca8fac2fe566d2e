"""`torch.nn.functional.scaled_dot_product_attention`: any device, any head_dim; the reference for the others."""

from __future__ import annotations

from vlm.attention.capability import ANY_DTYPE, Backend, Capability, HeadDim
from vlm.attention.platform import KINDS

BACKEND = Backend(
    name="sdpa",
    summary="torch's scaled_dot_product_attention",
    op="vlm.attention.backends.sdpa_op:construct",
    capability=Capability(
        roles=frozenset({"encoder", "decoder", "cross"}),
        dtypes=ANY_DTYPE,
        head_dim=HeadDim(),
        features=frozenset({"varlen", "causal", "paged", "sliding_window", "softcap", "sinks"}),
        platforms=dict.fromkeys(KINDS),
    ),
)
