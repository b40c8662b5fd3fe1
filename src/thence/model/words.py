"""Terms of tables and pages, each with its meaning: ``thence help words`` prints them, and pages show them on hover."""

WORDS = {
    "sum": "Durations added up. Where streams overlap it is more than the busy time.",
    "span": "From the beginning of the first to the end of the last of something, with the gaps between.",
    "busy": "Time in which at least one kernel, copy or memset ran on the GPU. Overlap counts once.",
    "idle": "Time between the first and the last activity of a GPU in which nothing ran on it.",
    "exposed": "Time in which only this row's work ran on the GPU. Of communication: nothing was computed meanwhile.",
    "overlapped": "Time in which work of several rows ran at once. With the exposed times of all rows it is the busy "
    "time.",
    "share": "Part of the sum of all selected work, unless the heading names another whole.",
    "count": "Number of GPU activities: kernels, copies and memsets. A replayed CUDA graph counts every node.",
    "free": "In whatif: the work of this row takes no time, so the gain is an upper bound for any change of it.",
    "step": "One iteration of the program: of training, decoding or another loop, as the trace or its marks tell.",
    "typical steps": "The steps without the first, those of warm-up, and outliers.",
    "outlier": "A step more than 8 median absolute deviations and 10 % longer or shorter than the median step.",
    "warm-up": "First executions that also compile, autotune or load kernels.",
    "launch": "The call on the host that enqueued an activity. It begins before the activity does.",
    "launch latency": "From the beginning of a launch to the beginning of its kernel.",
    "queued": "Launched, and waiting on its stream for earlier work.",
    "stream": "A queue of a GPU: work of one stream runs in order, work of several streams may overlap.",
    "rank": "One process of a job, as torch.distributed or jax numbers it.",
    "late rank": "A rank that reaches collectives last, so that the others wait for it.",
    "wait": "Of a collective: time from a rank's arrival to the arrival of the last rank that takes part.",
    "launched ahead": "Of hosts: they launched a collective early, so their GPUs wait in it. The host of the last rank "
    "does not need longer for a step.",
    "transfer": "Of a collective: time from the last arrival to the end.",
    "bus bandwidth": "Bytes of a collective per second, scaled by its kind as nccl-tests does, so that it can be "
    "compared with the link.",
    "place": "What GPU time is attributed to: a line, module, operator, label, HLO instruction or another kind.",
    "label": "A name that the program gave: record_function, NVTX, jax.named_scope or thence.mark.",
    "module": "An nn.Module of PyTorch or a module of Flax or Equinox, with its path in the model.",
    "op": "An operator of PyTorch, such as aten::mm.",
    "source": "The innermost line of your own code; --own adds packages.",
    "replay": "One launch of a CUDA graph, which runs all of its nodes.",
    "FLOP": "Floating-point operations that the program asked for: 2mnk for a matrix product.",
    "roofline": "The shortest time that the GPU's peak of arithmetic and its memory bandwidth allow for the work.",
    "headroom": "Time minus what the roofline allows.",
    "MFU": "FLOP of the model, without recomputation, over what the GPU could have done in the step.",
    "HFU": "As MFU, with recomputed FLOP.",
}
"""Meanings by term, in the order of ``thence help words``; at most 30 words each."""
