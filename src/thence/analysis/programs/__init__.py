"""XLA programs: their executions, which of these are warm-up, and their compilation."""
