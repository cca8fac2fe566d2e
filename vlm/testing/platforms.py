"""Machines that are not there, for tests of what the attention factory chooses."""

from __future__ import annotations

from vlm.attention.platform import Platform

# The same arguments as Platform.fake: fake_platform("cuda", (8, 0), importable={"flash_attn": "2.8.3"})
fake_platform = Platform.fake
