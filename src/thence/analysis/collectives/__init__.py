"""Collectives: matching their kernels across ranks, their times, who waits for whom, and the ranks' clocks."""
