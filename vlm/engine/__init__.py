"""Scheduling, the paged KV cache, sampling and the model step.

Knows token ids, features and budgets; no pictures, no templates, no file names.
"""
