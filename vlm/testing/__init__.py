"""For people who integrate a model: parity checks, tiny checkpoints, faked platforms, a pytest plugin."""
