"""ViT encoders: pixels in, features out. One file per vision model; each declares `upstream_fa`."""
