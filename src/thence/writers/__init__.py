"""Results as text, tables and files. A writer computes nothing."""
