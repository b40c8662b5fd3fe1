"""What changed between two sides of runs, and whether it is more than noise."""
