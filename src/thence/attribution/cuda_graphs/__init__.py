"""Finding the labels of captured CUDA graphs again on the activities of their replays."""
