"""What GPU time is grouped by: kinds of place, data types, groups of kernels, layers of a model."""
