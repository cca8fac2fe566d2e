"""LLM decoders: embeddings and a KV cache in, logits out. One file per text model."""
