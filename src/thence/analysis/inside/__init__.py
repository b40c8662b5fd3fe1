"""In-kernel profiles: summed up, matched with the launches of a trace, and laid under its kernels."""
