"""Collectives: which kernels are one, how long they take, who waits for whom, and the ranks' clocks."""
