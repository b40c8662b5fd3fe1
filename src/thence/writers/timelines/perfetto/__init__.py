"""Perfetto traces: native protobuf for ui.perfetto.dev and trace_processor.

wire.py       encodes columns in protobuf's wire format
interning.py  interned names, categories, argument keys and texts
tracks.py     track descriptors of processes, threads, devices, streams and lanes, in order
packets.py    slices with arguments and flows, counters -> packets
arguments.py  selects the columns that become arguments
layout.py     assigns rows of tables to tracks
job.py        summary rows of all ranks of a job
threads.py    order and names of host threads
gpu_views.py  a second copy of the activities, for Perfetto's GPU views
inside.py     tracks of in-kernel ranges
sides.py      two runs in one trace
write.py      a timeline -> the file
"""
