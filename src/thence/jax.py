"""What thence offers to JAX programs, as ``import thence.jax``; JAX is imported when a function needs it."""

from thence.capture.jax.streams import CustomCalls, custom_calls, on_stream, stream_of

__all__ = ["CustomCalls", "custom_calls", "on_stream", "stream_of"]
