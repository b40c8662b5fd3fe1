"""Bindings of libcupti and the CUDA driver through ctypes, which do not depend on recordings."""
