"""Kineto traces: the Chrome JSON that ``torch.profiler`` writes.

envelope.py   where the events begin and end, and what stands around them
chunks.py     cutting the events into pieces of whole events
events.py     one piece of JSON -> columns (runs in the decoding processes)
times.py      decimal microseconds -> integer nanoseconds
repair.py     events that strict decoding refuses
decoding.py   pieces -> columns, in this process or in several
links.py      which backward op belongs to which forward op
read.py       columns -> the tables of a trace
"""
