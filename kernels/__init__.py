"""Device code: Triton kernels, each with a plain-torch twin. Knows tensors, not models.

This file stays free of imports and registrations: when the repository root is on sys.path, transformers may execute
it under its bare name while it looks for another package that is called `kernels`.
"""
