"""Whether a trace can carry the figures that are read from it: a module for each family of rules."""
