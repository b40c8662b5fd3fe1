"""GPU time of a single function."""
