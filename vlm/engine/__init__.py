"""Time and memory: admission, scheduling, the paged KV cache, sampling. Knows token ids, features and budgets."""
