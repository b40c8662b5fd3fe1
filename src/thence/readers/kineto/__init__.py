"""Kineto traces: the Chrome JSON that ``torch.profiler`` writes.

sniffing.py          recognises a Kineto file
envelope.py          a file -> metadata and pieces of whole events
events.py            one piece of JSON -> columns (runs in the decoding processes, like all that it imports)
times.py             decimal microseconds -> integer nanoseconds
repair.py            lenient decoding of pieces that strict decoding rejects
piece_annotations.py annotations of CUDA graphs in one piece
decoding.py          pieces -> columns, in this process or in several
collecting.py        columns of pieces -> columns of the file
ranks.py             the rank of each (pid, tid) pair and of each device activity
metadata.py          versions, devices, process groups, rank and clock
forward_backward.py  the forward op of each backward op
read.py              columns -> the tables of a trace
"""
