"""Kineto traces: the Chrome JSON that ``torch.profiler`` writes.

sniffing.py          recognises a Kineto file
envelope.py          a file -> metadata and pieces of whole events
events.py            one piece of JSON -> columns (runs in the decoding processes, like all that it imports)
event_columns.py     columns from fields of events
times.py             decimal microseconds -> integer nanoseconds
repair.py            lenient decoding of pieces that strict decoding rejects
piece_annotations.py annotations of CUDA graphs in one piece
decoding.py          pieces -> columns, in this process or in several
processes.py         the decoding processes
ahead.py             starts to decode a file before its reader is imported
collecting.py        columns of pieces -> columns of the file
ranks.py             the rank of each (pid, tid) pair and of each device activity
annotations.py       annotations of CUDA graphs -> rows of graph_places
metadata.py          versions, devices, process groups, rank and clock
losses.py            missing, unreadable and repaired records
forward_backward.py  the forward op of each backward op
frames.py            columns -> single tables
read.py              columns -> the tables of a trace
device_events.py     the fields of an event that identify a device activity
"""
