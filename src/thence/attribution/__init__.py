"""From a device activity to where it came from. Knows tables, and nothing of file formats."""
