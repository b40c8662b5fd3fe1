"""Who makes the other ranks of a job wait, since when, and why."""
