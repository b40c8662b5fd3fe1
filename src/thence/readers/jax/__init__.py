"""JAX: xplane files of ``jax.profiler``, HLO modules, and their protobuf messages."""
