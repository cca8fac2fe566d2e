"""Messages -> token ids with image placeholders, for a chat template and a tokenizer."""
