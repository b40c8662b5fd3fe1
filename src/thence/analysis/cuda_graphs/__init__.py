"""Work in CUDA graphs: its nodes and edges, the mean replay of a graph, and its lanes."""
