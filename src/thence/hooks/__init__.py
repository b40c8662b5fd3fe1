"""What is attached to PyTorch and JAX in a program that is recorded."""
