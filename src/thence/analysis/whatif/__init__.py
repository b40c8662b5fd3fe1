"""What a change to the program would gain, and its critical path: the recorded program as a graph, replayed."""
