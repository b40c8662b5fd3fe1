"""The history of a program: its runs in order of time, since which run it is slower, and by which place."""
