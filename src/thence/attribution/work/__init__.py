"""FLOP and bytes of device activities, and how they were found."""
