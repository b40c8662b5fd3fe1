"""In-kernel profiles: summaries, matching with the kernel launches of a trace, and timelines."""
