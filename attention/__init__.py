"""What a layer needs -> which backend, and why. See docs/attention.md."""
