"""The work of XLA programs: HLO instructions, their places, command buffers and collectives."""
