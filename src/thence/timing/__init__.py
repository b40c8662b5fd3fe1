"""``thence.measure``: GPU time of a single function of JAX or PyTorch."""
