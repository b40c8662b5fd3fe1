"""Perfetto traces: native protobuf for ui.perfetto.dev and trace_processor.

wire.py       protobuf's wire format, written from columns
interning.py  names, categories, argument keys and texts, each written once
tracks.py     processes, threads, devices, streams and lanes, in order
packets.py    slices with arguments and flows, counters -> packets
arguments.py  which columns become arguments
layout.py     rows on tracks
job.py        all ranks of a job in few rows
threads.py    host threads, their order and names
gpu_views.py  activities once more, as Perfetto's GPU views read them
inside.py     in-kernel ranges on tracks
write.py      a timeline -> the file
"""
