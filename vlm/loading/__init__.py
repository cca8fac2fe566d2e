"""Model folders in Hugging Face layout -> configs and weights."""
