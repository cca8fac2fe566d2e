"""Small checkpoints, for their tokenizers and templates."""

from vlm.testing.plugin import vlm_tiny_checkpoints

__all__ = ["vlm_tiny_checkpoints"]
