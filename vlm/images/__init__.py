"""Image bytes -> RGB -> patches, as the reference processors compute them."""
