"""Collectives: matching their kernels across ranks, their times, waits and last arrivals, and the ranks' clocks."""
