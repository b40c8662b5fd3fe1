"""Snapshots of PyTorch's memory allocator, as ``torch.cuda.memory._dump_snapshot`` pickles them.

In the order of the data:

sniffing.py      whether a file is one
tape.py          the value in the pickle as columns, by the unpickler (_unpickler.c; readers/compiled.py) or in Python
read.py          from those columns to the columns of segments, blocks, events and frames
replay.py        sizes of blocks, by the rules of the allocator, and which are live when
"""
