"""libcupti and the CUDA driver through ctypes: bindings that know nothing of recordings."""
