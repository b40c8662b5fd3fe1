"""What runs in a recorded program: hooks, marks, the recorder and the launcher; it imports nothing heavy."""
