"""``thence.record`` and ``thence record``: recording the GPU work of this process, or of a command."""
