"""Kineto traces: the Chrome JSON that ``torch.profiler`` writes.

sniffing.py      recognises a Kineto file
early_start.py   starts to decode a file before its reader is imported
envelope.py      a file -> metadata and pieces of whole events
decoding.py      pieces -> columns, in threads, or in this process or several
processes.py     the decoding processes
events.py        one piece of JSON -> columns (runs in the decoding processes, like all that it imports)
event_structs.py the fields of an event that are read, and their types
rows.py          fields of the events of a piece, as decoded by msgspec
scanner.py       the same, as read by the compiled scanner (_scanner.c, _json.h; readers/compiled.py)
times.py         decimal microseconds -> integer nanoseconds
repair.py        lenient decoding of pieces that strict decoding rejects
collecting.py    columns of pieces -> columns of the file
ranks.py         the rank of each (pid, tid) pair and of each device activity
metadata.py      versions, devices, process groups, rank and clock
tables.py        columns of the file -> single tables, with forward ops and annotations of CUDA graphs
read.py          a file -> the tables of a trace, with its losses
"""
