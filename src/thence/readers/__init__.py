"""One reader per producer: bytes -> tables. A reader knows one format and nothing of analysis."""
