"""Archives of nsys-jax (JAX-Toolbox): projected NVTX ranges, HLO protos and compile ranges."""
