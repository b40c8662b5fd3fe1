"""``thence.measure``: measures the GPU time of a single JAX or PyTorch function."""
