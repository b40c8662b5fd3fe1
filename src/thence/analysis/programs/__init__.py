"""XLA programs: their executions, what of them is warm-up, and their compilation."""
