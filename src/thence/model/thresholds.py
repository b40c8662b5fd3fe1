"""Tolerances, latencies and shares that decide about figures, each once.

A threshold is here if two modules use it or if another value would change a figure, a verdict or a row that is shown.
Limits of memory and time, numbers of rows that are shown and constants of algorithms stay beside their code. The ending
of a name is its unit: ``_NS`` nanoseconds, ``_SHARE`` a share of what the text says; all others are numbers or ratios.
The text below each says what it decides, why it has this value, and where that was measured, if it was. docs/numbers.md
prints all of them as a table (`docs/make_thresholds.py`).
"""

from __future__ import annotations

# --- Clocks and timestamps

TIMESTAMP_NS = 1_000
"""Resolution of GPU timestamps: of two activities of which one waited for the other, the later may seem to begin this
much before the end of the first; clocks of ranks that differ by no more are not corrected."""
EARLY_RETURN_NS = 2_000
"""A host call that waited for the device may seem to return this much before the work ended: the clock of the host is
another one. Work that ends later was not what the call waited for."""
CLOCKS_NOTED_NS = 10_000
"""Times of host and device that contradict each other by more are a note of `thence check`."""
CLOCKS_WRONG_NS = 50_000
"""... and by more than this, a finding; sound recordings stay below."""
CALLS_ALIGNED_NS = 20_000
"""If several alignments of two ranks' collectives fit, the one whose calls end within this time counts."""
MIN_CLOCK_SAMPLES = 8
"""Least number of shared collectives of a rank for which the drift of its clock is fitted."""
CLOCK_SCATTER_QUANTILE = 0.9
"""Quantile of the absolute residuals of clocks that a correction must exceed."""
CLOCK_DRIFT_RATIO = 5
"""A drift is applied if it moves a rank by more than this many times the scatter of the residuals."""

# --- Launches, queues and waits

MAX_LAUNCH_LATENCY_NS = 100_000
"""Longest time from a launch to the start of an activity that nothing holds; idle time beyond it is unexplained.
Launches take 2 to 20 us on the GPUs that were measured, and the clocks of sound traces differ by up to 50 us."""
MAX_QUEUED_GAP_NS = 5_000
"""Longest idle time between two activities of which the second was launched before it: beyond, it is unexplained."""
MAX_UNEXPLAINED_SHARE = 0.05
"""Share of the time by which activities may begin later than the trace explains. Above it, nothing is predicted and
idle time is an upper bound. Of 60 sound recordings none has over 0.02 of idle time of this kind."""
FIRST_USE_CALL_NS = 200_000
"""A launch of a kernel's first use that takes longer loaded the kernel; other launches take 2 to 30 us."""
FIRST_USE_OPERATOR_NS = 1_000_000
"""An operator that takes longer until it launches a kernel of a new name prepared that kernel."""
LONG_BUILT_IN_NS = 100_000
"""A recorded call of a C function that takes longer is not Python: isinstance, append and the like take 1 us."""
FULL_QUEUE_CALL_NS = 100_000
"""A launch waited for room in the queue of its device if it took longer than this ..."""
FULL_QUEUE_CALL_RATIO = 20
"""... and more than this many times the median launch (`thence.analysis.ranks.summary`)."""
NO_WAIT_NS = 20_000
"""A call that has nothing to wait for, such as one for another device, takes less; one that takes longer waited."""
MIN_IDLE_STARTS = 5
"""Launches on an idle device from which the clock of a rank is judged: in sound traces each starts at most 13 us after
its call returned."""
LAUNCHED_AT_END_NS = 10_000_000
"""Launches up to this long after the last recorded work, ..."""
LAUNCHED_AT_END_SHARE = 0.05
"""... or this share of the recording if it is longer, may have had work after its end; later ones lost theirs."""
FASTEST_KERNEL_NS = 250
"""No kernel is shorter: the shortest of 400,000 on H100 and H200 GPUs took 543 ns."""
OUTLASTS_NS = 10_000
"""By this much an activity may outlast ten later ones of its stream, if all are known to be of one process, ..."""
OUTLASTS_UNKNOWN_NS = 1_000_000
"""... and if that is unknown."""

# --- The simulation of what-if and the critical path

QUEUED_AHEAD_NS = 20_000
"""The gap between two activities of a stream is a sample of the least gap if the second was launched this long before
the first ended: then it only waited for the stream."""
LONG_LAUNCH_NS = 20_000
"""A launching call that takes longer did more than launch: its time is part of the latency of its activity."""
AWAITED_BEFORE_RETURN_NS = 20_000
"""How shortly before the return of a blocked launch the activity that it waited for must have ended."""
WAIT_RETURN_NS = 5_000
"""Longest time that a waiting call needs to return after the work ended; the rest stays as a delay."""
WAIT_CALL_NS = 4_000
"""Time that a waiting call takes if it waits for nothing; also that of a launch without enough samples."""
BLOCKED_LAUNCH_RATIO = 2
"""A launch that takes more than this many times the usual time, while the queue is full, was blocked."""
MIN_OUTSTANDING = 256
"""Least number of activities of a stream that were launched and have not ended where a launch is blocked because the
queue is full. The queue has 1,024 entries; events and waits take some of them, and kernels more than one."""
MIN_SAMPLES = 8
"""Least number of samples of a latency, a gap or a pace; with fewer, the values below are assumed."""
DEFAULT_LATENCY_NS = 5_000
"""Least latency of a launch, without enough samples."""
DEFAULT_GAP_NS = 1_000
"""Least gap between two activities that wait for each other, without enough samples."""
DEFAULT_EVENT_NS = 500
"""What waiting through an event adds to the gap."""
HANDED_OVER_NS = 2_000_000
"""Longest time from the end of a thread's work to the start of the work that it hands over: autograd first scans its
whole graph, which took 0.5 ms for a model with 6 layers."""
THREAD_RESTED_NS = 15_000
"""A thread without work for this long may have been given work by another thread."""
LATE_START_NS = 20_000
"""An activity that begins later than the simulation explains, by more than this, counts as unexplained time."""
MAX_SCALED_NS = 100_000
"""Of a longer piece of the host's work, only this much is scaled to the step without recording. Limits of 0.1, 0.2 and
0.5 ms change no prediction for programs of tests/gpu/whatif.py by more than 2 % of the step; without a limit,
pauses of 3 ms became shorter."""
MIN_HOST_FACTOR = 0.3
"""Least factor of the host's work: recording made no program more than three times as slow."""
MIN_NOISE_SHARE = 0.04
"""Least half width of the interval of a prediction, as a share of the step."""
HOST_NOISE_SHARE = 0.08
"""Least difference of the host's work from run to run, as a share of it."""
PACE_NOISE_SHARE = 0.2
"""Least difference of the host's pace from trace to trace, as a share of it."""
MAX_WITHOUT_EDGES_SHARE = 0.05
"""A change is refused if more than this share of the work that it changes is in CUDA graphs without known edges."""

# --- Steps

MIN_REPEATS = 3
"""Steps that are found by repetition repeat at least this often: two equal calls may be chance."""
REPEATED_SHARE = 0.8
"""Least share of a sequence that equals what stands one period later: warm-up, evaluation and pauses interrupt
loops."""
LONGER_PERIOD_SHARE = 0.01
"""A longer period counts only if that much more of the sequence fits it: a change of the batch size between hundreds of
equal launches favours no period, a first and a last layer that differ from 80 others do."""
STEP_PROGRAM_SHARE = 0.1
"""Least share of the device time of XLA programs in the program whose executions are steps."""
STEP_RANGES_SHARE = 0.5
"""Least share of the device time that was launched in ranges that count steps, or by CUDA graphs, if they are steps:
other ranges count batches that they load, and a program may use a small graph somewhere."""
STANDARD_DEVIATIONS_PER_MAD = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""
OUTLIER_DEVIATIONS = 8
"""A step is an outlier, in every verb, if it differs from the median by more than this many such deviations ..."""
OUTLIER_SHARE = 0.1
"""... and by more than this share of the median."""
REST_OF_STEP_SHARE = 0.5
"""The last step is only the rest of a recording if it computed for less than this share of the median."""
MIN_STEPS_BESIDE_LAST = 3
"""Least number of other steps for the last one to be left out."""
MIN_STEPS_FOR_WARM_UP = 4
"""Least number of steps of which some may be warm-up."""
MIN_STEPS_FOR_OUTLIERS = 8
"""Least number of steps of which some may be left out as outliers: fewer do not show what is ordinary."""
BETWEEN_PROCESSES_SHARE = 0.005
"""Share of a step by which processes that do the same differ. On an H100, a compiled training step took 0.3 % longer
while CUPTI was detached than in processes that were never recorded, whose medians differed by 0.03 %
(`benchmarks/gpu_plain_step.py`)."""
BETWEEN_PROCESSES_HOST_SHARE = 0.15
"""... and the same, of the time of a step in which nothing runs on the GPU, beyond the range of the unrecorded windows
of one process. On an H100, medians of processes without thence were in that range, wider by `BETWEEN_PROCESSES_SHARE`,
in 50 of 62 pairs with recordings of the same program; with 0.05 in 54, 0.1 in 58, 0.15 in 61 (five programs of
`benchmarks/gpu_plain_step.py`, of which four wait for their host for 53 to 98 % of a step). On another H100, later, six
programs: 66 of 74 without, 72 with 0.15."""

# --- The verdict and what is shown first

VERDICT_IDLE_SHARE = 0.1
"""From this share of a step on, idle time decides the verdict, and `idle` is proposed: the queue runs empty in every
step, so the host decides how long it takes."""
VERDICT_EXPOSED_SHARE = 0.2
"""From this share of a step on, exposed communication may decide the verdict: unlike idle time, it only adds up."""
PROPOSED_EXPOSED_SHARE = 0.1
"""From this share of a step on, exposed communication is worth `collectives`, though it may not decide the verdict."""
PROPOSED_COMPILING_SHARE = 0.2
"""From this share of the recording on, compilation is worth `compile`."""
PROPOSED_SPREAD_SHARE = 0.1
"""Share by which typical steps are longer or shorter than their median, from which on `steps` is proposed."""
PROPOSED_COVERED_SHARE = 0.5
"""Least share of the GPU time with a place of a kind for a command by that kind to be proposed."""
ONE_LINE_SHARE = 0.9
"""Share of the GPU time on one source line from which on the lines inside the library that it calls are worth
having."""
UNEVEN_SHARE = 0.05
"""From this difference between GPUs on, a share of a step is stated with its range over the GPUs, because its median
may be the figure of none of them."""
NAMED_CAUSE_SHARE = 0.1
"""Share of the idle time from which on the verdict names a cause."""
MAX_HOST_RANGES = 1_000_000
"""With more host ranges, idle time is divided by cause only for some of the typical steps, in a comparison not at all,
and late ranks are not looked for on the first screen: that takes some 2 s of CPU time per million."""
SAMPLED_HOST_RANGES = 250_000
"""Most host ranges of the typical steps in which the first screen then divides idle time by cause."""
WAITING_SHARE = 0.5
"""Share of exposed communication that is waiting for other ranks from which it is not called communication-bound."""
SHOWN_SHARE = 0.01
"""Parts of a run and programs below this share of the whole are not named."""
SHOWN_AT_FIRST_SHARE = 0.005
"""Causes and places below this share are not on the first screen."""
MAIN_PROGRAMS_SHARE = 0.9
"""The main programs are the fewest that take this share of the time of XLA programs in the typical steps."""
WELL_COVERED_SHARE = 2 / 3
"""A kind of place is the default of `report` if it covers this share of the GPU time. Tables of `report` show
the headroom of rows of which this share of the time has a roofline."""

# --- Ranks and collectives

LATE_RANK_SHARE = 0.02
"""A late rank makes the others wait for more than this share of a step."""
SHOWN_CONFIDENCE = 0.95
"""Probability with which all lower bounds of waits that are shown hold together."""
LATE_CONFIDENCE = 0.99
"""Probability with which all lower bounds that decide about late ranks hold together."""
MIN_STEPS_FOR_LATE_RANKS = 3
"""Least number of steps from which a bound of the wait is computed."""
TOGETHER_SHARE = 0.1
"""Arrivals at a collective that are at most this share of its longest wait apart count as one; so a participant that
the trace lacks and that arrived at most that much later leaves nine tenths of the wait to the last one shown."""
NAMED_PLACE_SHARE = 0.2
"""A place is named as the reason of a late rank if it has at least this share of a cause's extra time."""
SLOWER_GPU_RATIO = 1.01
"""Least ratio of the kernels' times with which a GPU counts as slower; smaller ratios are noise."""
LISTED_CAUSE_SHARE = 0.03
"""A cause is listed if it has at least this share of the lateness."""
UNUSUAL_STEP_RATIO = 4
"""A step in which a late rank caused more than this many times its median is left out of the explanation: its cause may
differ from that of the other steps."""
FIRST_CALL_NS = 10_000_000
"""The first call of a group created its communicator if it took longer than this ..."""
FIRST_CALL_RATIO = 10
"""... and more than this many times the median of the group's other calls."""

# --- Differences

FALSE_DISCOVERY_RATE = 0.05
"""Also the probability that the true difference is outside of its 95 % interval."""
SAME_SHARE = 0.01
"""A row is the same if the interval of its difference lies within this share of the row's time before, ..."""
NEGLIGIBLE_STEP_SHARE = 0.001
"""... or within this share of the step, if that is more; rows, moved work and moved time below it are not shown."""
ONE_RUN_STEP_SHARE = 0.09
"""With one run a side, the length of a step is not called different up to this share: of 13 programs whose step their
hosts limited, 12 took up to 9 % longer or less in another run than their trace predicts, and programs that their device
limited up to 4 %."""
ONE_RUN_WORK_SHARE = 0.13
"""The same for busy time and the time of kernels and places: the largest of the 95th percentiles by which kernels of
equal name and number differed between two processes of one program (`benchmarks/diff_noise.py processes`): 12 % in a
Llama under DistributedDataParallel and 12 % under FSDP2 on two H100s, 13 % in a JAX program on two H200s."""
ONE_RUN_IDLE_SHARE = 0.55
"""The same for idle time and exposed communication, which depend on the pace of hosts: it had a standard deviation of
20 % from run to run, so two runs differ by up to 1.96 * sqrt(2) * 20 %."""
MOVED_SHARE = 0.95
"""Share of a row's launches that must be on another stream than before for the row to have moved as a whole."""
PARTLY_MOVED_SHARE = 0.05
"""Share of a row's launches on another stream from which on the row moved partly."""
MOVED_COUNT_SHARE = 0.02
"""Share by which the number of launches of the moved work and of the work beside it may differ between the sides: if it
differs more, their time also changed for that reason, and contention is not known."""
MOVED_VERDICT_SHARE = 0.2
"""Share of the change of a step that contention less the overlap gained must be for the verdict on the step to be that
on what moved."""
OTHER_GRIDS_SHARE = 0.5
"""Inputs have other shapes if grids differ in more than this share of the common kernels' time, ..."""
MAX_OTHER_GRIDS_SHARE = 0.05
"""... or in more than this if the bytes copied to the device also differ."""
SAME_BYTES_SHARE = 0.01
"""Share by which the bytes that are copied to the device may differ."""
COMMON_KERNELS_SHARE = 0.2
"""Share of all time that the common kernels must take for a comparison of their grids to mean something."""
GPU_CLOCK_SHARE = 0.2
"""One factor explains the kernels' ratios of times if their quartiles differ by at most this part of the change."""
NEARLY_BEST_SHARE = 0.7
"""Share of the best explanation that a cause of a more informative kind must reach to be named instead."""
PATH_INSIDE_SHARE = 0.9
"""Share of the best explanation of a kind that a path inside must reach to be named instead."""
EXPLAINING_SHARE = 0.2
"""A row that explains less than this part of the total is not named as a cause."""
SLOW_LINK_SHARE = 0.5
"""A straggler is late because of a slow link if its group's transfers take longer by this share of what it causes."""
CHANGE_LEVEL = 0.01
"""Probability with which a history without a change names one of the step, and that with which it names one of any
other row."""
ONE_CHANGE_RUNS = 3
"""Changes of several rows of a history that are at most so many runs apart are one change."""
HISTORY_ROW_SHARE = 0.01
"""Share of the longest step that a place must take in one run for its changes to be looked for in a history."""

# --- XLA programs

MATRIX_FLOPS_PER_BYTE = 200
"""Matrix operations for each byte of memory at which a fusion is as much limited by one as by the other: an H100 does
some 990 T (BF16) a second at 3.35 TB/s, an H200 at 4.8 TB/s."""
VECTOR_OPERATIONS_PER_BYTE = 10
"""The same of vector operations: 33 T a second (FP32; XLA does not contract multiply and add)."""
LIMIT_SHARPNESS = 4
"""How much the longer of the times for bytes and operations of a fusion hides the shorter; chosen among four values on
the programs of `benchmarks/gpu_fusion_lines.py`."""
CONTRADICTING_LAUNCHES_SHARE = 0.02
"""Share of the launches of a level of a command buffer that may contradict the rules; one launch always may. A
recording can begin or end within a launch, and may lose records, while a wrong numbering shows in most launches."""
PROOFS_FOR_EACH = 10
"""How many activities that prove their slot in a command buffer outweigh one that contradicts its own."""

# --- roofline

SHORT_KERNEL_NS = 5_000
"""A kernel of at most this time that takes more than twice its roofline is limited by latency: starting its blocks,
filling the pipelines of its loads and draining them takes some microseconds, whatever it computes."""
MAX_OVER_PEAK = 1.1
"""FLOP in an activity's time may exceed the peak of its data type by this factor, because a chip can run above the
clock of its data sheet (an H100's by 8 %); bytes that no cache holds may exceed the memory's bandwidth by as much.
Above it the count is wrong, and the activity counts as without a model."""

# --- hardware counters

COUNTER_ENDS_NS = 3_000
"""The beginning and the end of an activity count at rates of their own for so long, at most a third of it each. Of
kernels of known work on an H200 in samples of 5 and 10 us, errors fell from 9 to 1 % at 6.5 us; 2 us and 4 us did
worse (`benchmarks/counters_truth.py`)."""
COUNTER_EDGE_NS = 350
"""By how much the times of samples and of activities may differ, as a standard deviation: what remained of the errors
of these kernels is that of 0.1 us (tensor cores, memory) to 0.35 us (instructions)."""
COUNTER_ENERGY_EDGE_NS = 100_000_000
"""The same for energy: NVML renews its reading some ten times a second."""
COUNTER_UNEVEN = 0.5
"""Standard deviations of the work of a part of an activity that the same part of all launches may have in common."""
COUNTER_KIND_RATIO = 1.3
"""Launches of one kernel whose durations differ by more than this, with none in between, are of two kinds."""
COUNTER_GAP_RATIO = 2
"""Of files that state one time for each sample: one that comes later than so many usual intervals after the one before
begins a new window."""
COUNTER_ERROR_SHARE = 0.1
"""A counted figure is shown if its 95 % interval is at most this share of it on each side."""
