"""The traces that questions are about, and the questions with their known answers.

Every answer follows from what was planted, from a simulation of the program without it, or from a recording whose
fault was planted when it was made (the ORIGIN.md of its folder). None was computed by thence.

Two thirds of the worlds are the same in every run; a third is drawn with the seed of the run.
"""

from __future__ import annotations

import random
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import diff_runs
import faults
from helpers import DATA, STACK, recording
from late_ranks import SleepyJob
from loops import Loop, parts
from question import UNKNOWN, Question, World
from work_traces import BF16_TFLOPS, GBPS, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMITS = ("gpu_bound", "host_bound", "launch_bound", "input_bound", "communication_bound", "waits_for_rank")
_NO_LATE_RANK = r"(?i)\brank \d+( GPU \d+)? (is late|is a straggler|makes (the )?others wait)"
_NO_INPUT_BOUND = r"(?i)\binput-bound"
_HOST_LINE = "Which line of the program does the host run meanwhile, as FILE:LINE FUNCTION?"
_LATE_LINE = "In which line does the late rank lose its time, as FILE:LINE FUNCTION?"


def worlds(folder: Path, seed: int) -> Iterator[World]:
    """All worlds, written below a folder.

    Args:
        folder: for their files.
        seed: of the third that differs from run to run.
    """
    kept: list[tuple[str, Callable[[str, Path, int], World]]] = [
        ("gpu_bound", gpu_bound), ("loader", loader), ("pause", pause), ("launch", launch), ("reads", reads),
        ("late", late), ("even", even), ("slower", slower), ("rearranged", rearranged), ("lost", lost),
        ("no_host", no_host), ("alone", alone), ("matmul", matmul), ("recorded_late", recorded_late),
    ]  # fmt: skip
    drawn: list[tuple[str, Callable[[str, Path, int], World]]] = [
        ("loader_drawn", loader), ("pause_drawn", pause), ("launch_drawn", launch), ("gpu_bound_drawn", gpu_bound),
        ("late_drawn", late), ("slower_drawn", slower), ("lost_drawn", lost),
    ]  # fmt: skip
    for number, (name, make) in enumerate(kept):
        yield _made(make, name, folder, 100 + number)
    for number, (name, make) in enumerate(drawn):
        yield _made(make, name, folder, 1_000 * seed + number)


def _made(make: Callable[[str, Path, int], World], name: str, folder: Path, seed: int) -> World:
    place = folder / name
    place.mkdir()
    return make(name, place, seed)


# ---- Loops on one GPU


def gpu_bound(name: str, folder: Path, seed: int) -> World:
    """Kernels of hundreds of microseconds that the host launches ahead."""
    loop = Loop(parts(seed, us=(200, 600)), waits=False)
    largest = max(loop.parts, key=lambda part: part.us)
    half = _gain(loop, loop.faster(largest.kernel, 0.5))
    return World(
        name,
        (loop.write(folder / "trace.json"),),
        (
            *_where(loop), *_step(loop), *_one_device(),
            Question("limit:verdict", "What limits a step?", "gpu_bound", must_not=("input_bound", "host_bound")),
            Question(f"gain:half_kernel:{largest.kernel}",
                     f"By how many ns would a step be shorter if {largest.kernel} took half its time?", half,
                     within=0.05 * 1000 * loop.run.step_us),
            Question("gain:free_cause:loader", "By how many ns would a step be shorter if loading data took no time?",
                     _gain(loop, loop.without(loader_us=0)), within=0.03 * 1000 * loop.run.step_us),
        ),
        must_not_say=(_NO_INPUT_BOUND, _NO_LATE_RANK),
    )  # fmt: skip


def loader(name: str, folder: Path, seed: int) -> World:
    """The host loads data for longer than the GPU computes."""
    loop = Loop(parts(seed, us=(100, 300)), loader_us=random.Random(seed).randrange(1_200, 3_000, 100))
    gain = _gain(loop, loop.without(loader_us=0))
    return _waiting(name, folder, loop, "loader", "input_bound", ("gain:free_cause:loader", gain))


def pause(name: str, folder: Path, seed: int) -> World:
    """The host runs other Python code in one label."""
    made = parts(seed, us=(100, 300))
    paused = made[random.Random(seed).randrange(1, 4)].label
    loop = Loop(made, pause_us=random.Random(seed).randrange(2_000, 4_000, 100), paused=paused)
    gain = _gain(loop, loop.without(pause_us=0))
    world = _waiting(name, folder, loop, "python", "host_bound", ("gain:free_cause:python", gain))
    place = Question("idle:place", "In which label of the program does the host keep the GPU waiting?", paused,
                     must_not=tuple(p.label for p in made if p.label != paused))  # fmt: skip
    line = Question("idle:line", _HOST_LINE, "train.py:17 save_metrics")
    return replace(world, questions=(*world.questions, place, line), must_not_say=(_NO_INPUT_BOUND, _NO_LATE_RANK))


def launch(name: str, folder: Path, seed: int) -> World:
    """Kernels that are shorter than the operators that launch them."""
    loop = Loop(parts(seed, us=(5, 15), operator_us=(60, 90)))
    world = _waiting(name, folder, loop, "operator", "launch_bound", None)
    return replace(world, must_not_say=(_NO_INPUT_BOUND, _NO_LATE_RANK))


def reads(name: str, folder: Path, seed: int) -> World:
    """The host reads a number after each label, so the GPU waits for each launch."""
    loop = Loop(parts(seed, us=(40, 80), operator_us=(60, 90)), reads=True)
    gain = _gain(loop, loop.without(reads=False, waits=True))
    within = 0.08 * 1000 * loop.run.step_us
    return World(
        name,
        (loop.write(folder / "trace.json"),),
        (
            *_step(loop), *_one_device(),
            Question("gain:no_wait:item", "By how many ns would a step be shorter if item() did not wait?", gain,
                     within),
            Question("limit:verdict", "What limits a step?", "launch_bound", must_not=("gpu_bound", "input_bound")),
        ),
        must_not_say=(_NO_INPUT_BOUND, _NO_LATE_RANK),
    )  # fmt: skip


def _waiting(name: str, folder: Path, loop: Loop, cause: str, limit: str, gain: tuple[str, float] | None) -> World:
    """A loop whose GPU waits for its host, for a cause that was planted."""
    run = loop.run
    what = {"loader": "loader", "python": "pause"}.get(cause)
    step_ns = 1000 * run.step_us
    others = [code for code in ("loader", "python", "operator", "sync") if code != cause]
    questions = [
        *_where(loop), *_step(loop), *_one_device(),
        Question("idle:cause", "For which cause is the GPU idle longest?", cause, must_not=tuple(others)),
        Question("limit:verdict", "What limits a step?", limit,
                 must_not=tuple(code for code in LIMITS if code != limit)),
    ]  # fmt: skip
    if what is not None:
        text = f"For which share of a step is the GPU idle because of the cause {cause}?"
        questions.append(Question(f"idle:cause_share:{cause}", text, run.idle_during(what), within=0.02))
    if gain is not None:
        text = f"By how many ns would a step be shorter if the cause {cause} took no time?"
        questions.append(Question(gain[0], text, gain[1], within=0.05 * step_ns))
    return World(name, (loop.write(folder / "trace.json"),), tuple(questions), must_not_say=(_NO_LATE_RANK,))


def _where(loop: Loop) -> Iterator[Question]:
    """Where the time of the GPU goes."""
    total = sum(part.us for part in loop.parts)
    ordered = sorted(loop.parts, key=lambda part: -part.us)
    first, second, last = ordered[0], ordered[1], ordered[-1]
    yield Question("where:kernel", "Which kernel takes most GPU time?", first.kernel)
    yield Question("where:label", "Which label takes most GPU time?", first.label, must_not=(last.label,))
    for kind, of in (("kernel", first.kernel), ("label", first.label), ("label", second.label)):
        part = first if of in (first.kernel, first.label) else second
        text = f"Which share of the GPU time is that of the {kind} {of}?"
        yield Question(f"where:{kind}_share:{of}", text, part.us / total, within=0.005)
    text = "Which nn.Module takes most GPU time?"
    yield Question("where:module", text, UNKNOWN)


def _step(loop: Loop) -> Iterator[Question]:
    """How long a step is, and how busy the GPU."""
    run = loop.run
    step_ns = 1000 * run.step_us
    yield Question("step:median_ns", "How many ns does a typical step take?", step_ns, within=0.02 * step_ns)
    yield Question("step:busy_share", "For which share of a typical step does the GPU work?", run.busy_share, 0.02)
    yield Question("step:count", "How many steps does the trace show?", loop.steps)


def _one_device() -> Iterator[Question]:
    """What a trace of one rank without sizes of inputs and memory cannot tell."""
    yield Question("sound:sound", "Is the trace sound?", answer=True)
    yield Question("late:rank", "Which rank makes the others wait?", UNKNOWN)
    yield Question("use:mfu", "Which share of the GPU's peak FLOP do the steps reach (MFU)?", UNKNOWN)
    yield Question("memory:peak_bytes", "How many bytes of GPU memory were allocated at the peak?", UNKNOWN)
    yield Question("change:kernel", "Which kernel became slower since the last run?", UNKNOWN)


def _gain(recorded: Loop, changed: Loop) -> float:
    """By how many ns a step is shorter in a run of the changed program."""
    return 1000 * (recorded.run.step_us - changed.run.step_us)


# ---- Jobs of several ranks


def late(name: str, folder: Path, seed: int) -> World:
    """One host sleeps in backward, from a step on."""
    draw = random.Random(seed)
    ranks, sleep = draw.randrange(2, 5), draw.randrange(40_000, 200_000, 1_000)
    job = SleepyJob(ranks=ranks, steps=7, late=draw.randrange(ranks), sleep=sleep, uneven=draw.randrange(0, 300))
    # The others arrive later than the step begins by as much as their own work takes.
    length = [_length(job, step) for step in range(job.steps)]
    waits = [
        max(0, job.sleep + job.backward(job.late, step) - min(
            job.backward(rank, step) for rank in range(ranks) if rank != job.late
        ))
        for step in range(1, job.steps)
    ]  # fmt: skip
    share = sum(waits) / sum(length[1:])
    others = tuple(rank for rank in range(ranks) if rank != job.late)
    wrong = "|".join(map(str, others))
    return World(
        name,
        tuple(job.write(folder)),
        (
            Question("late:rank", "Which rank makes the others wait?", job.late, must_not=(*others, "none")),
            Question("late:wait_ns", "How many ns of a step do the others wait for it?", 1000 * sum(waits) / len(waits),
                     within=0.03 * 1000 * sum(waits) / len(waits)),
            Question("late:share", "Which share of a step do the others wait for it?", share, within=0.02),
            Question("limit:verdict", "What limits a step?", "waits_for_rank", must_not=("input_bound",)),
            Question("late:line", _LATE_LINE, "/home/me/train.py:40 hook"),
            Question("sound:sound", "Is the trace sound?", answer=True),
            Question("memory:peak_bytes", "How many bytes of GPU memory were allocated at the peak?", UNKNOWN),
        ),
        must_not_say=(rf"(?i)\brank ({wrong})( GPU \d+)? (is late|is a straggler|makes (the )?others wait)",),
    )  # fmt: skip


def even(name: str, folder: Path, seed: int) -> World:
    """No rank is late."""
    job = SleepyJob(ranks=3, steps=7, sleep=0, uneven=random.Random(seed).randrange(200, 600))
    return World(
        name,
        tuple(job.write(folder)),
        (
            Question("late:rank", "Which rank makes the others wait? (none, if none does)", "none",
                     must_not=(0, 1, 2)),
            Question("step:median_ns", "How many ns does a typical step take?", 1000 * _length(job, 2),
                     within=0.02 * 1000 * _length(job, 2)),
            Question("limit:verdict", "What limits a step?", "gpu_bound", must_not=("waits_for_rank",)),
            Question("late:line", _LATE_LINE, UNKNOWN),
        ),
        must_not_say=(_NO_LATE_RANK,),
    )  # fmt: skip


def alone(name: str, folder: Path, seed: int) -> World:
    """One rank of a job of three: who is late cannot be known."""
    job = SleepyJob(ranks=3, steps=7, late=1, sleep=random.Random(seed).randrange(50_000, 100_000, 1_000))
    return World(
        name,
        (job.write(folder)[0],),
        (
            Question("late:rank", "Which rank makes the others wait?", UNKNOWN),
            Question("late:share", "Which share of a step do the others wait for it?", UNKNOWN),
            Question("late:wait_ns", "How many ns of a step do the others wait for it?", UNKNOWN),
            Question("late:line", _LATE_LINE, UNKNOWN),
            Question("change:kernel", "Which kernel became slower since the last run?", UNKNOWN),
            Question("gain:on_time:1", "By how many ns would a step be shorter if rank 1 were in time?", UNKNOWN),
        ),
        must_not_say=(_NO_LATE_RANK,),
    )


def recorded_late(name: str, folder: Path, seed: int) -> World:
    """A recording of two H100s: from step 6 on rank 1 slept 30 ms in each backward pass (tests/data/recording)."""
    del seed
    with tarfile.open(DATA / "recording" / "late_in_backward.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (job,) = folder.iterdir()
    return World(
        name,
        (job,),
        (
            Question("late:rank", "Which rank makes the others wait?", 1, must_not=(0, "none")),
            Question("late:wait_ns", "How many ns of a step do the others wait for it?", 30e6, within=3e6),
            Question("limit:verdict", "What limits a step?", "waits_for_rank", must_not=("input_bound",)),
            Question("sound:sound", "Is the trace sound?", answer=True),
            Question("memory:peak_bytes", "How many bytes of GPU memory were allocated at the peak?", UNKNOWN),
        ),
        must_not_say=(r"(?i)\brank 0( GPU \d+)? (is late|is a straggler|makes (the )?others wait)",),
    )


def _length(job: SleepyJob, step: int) -> int:
    """Length of a step of a job, us: until its last rank has computed, and the all-reduce."""
    worked = max(100 + 30_000 + job.sleeps(rank, step) + 100 + job.backward(rank, step) for rank in range(job.ranks))
    return worked + 10_000 + 10


# ---- Two runs


def slower(name: str, folder: Path, seed: int) -> World:
    """One kernel takes longer than in the run before."""
    draw = random.Random(seed)
    part = draw.choice(diff_runs.STEP[:3])
    factor = draw.uniform(1.4, 1.9)
    work = diff_runs.changed(diff_runs.STEP, part.kernel, us=part.us * factor)
    runs = {
        side: tuple(
            diff_runs.trace_file(folder / f"{side}{n}.json", 10 * seed + n + 5 * (side == "after"), steps_of)
            for n in range(2)
        )
        for side, steps_of in (("before", diff_runs.STEP), ("after", work))
    }
    grown = 1000 * part.us * (factor - 1)
    others = tuple(p.kernel for p in diff_runs.STEP if p.kernel != part.kernel)
    return World(
        name,
        runs["after"],
        (
            Question("change:kernel", "Which kernel became slower since the run before?", part.kernel, must_not=others),
            Question("change:kernel_ns", "By how many ns per step?", grown, within=0.1 * grown),
            Question("change:total", "Did a step become slower, faster, or did it stay the same?", "slower",
                     must_not=("faster", "same")),
            Question(f"change:verdict:{others[0]}", f"Did {others[0]} become slower or faster?", "same",
                     must_not=("slower", "faster")),
        ),
        before=runs["before"],
    )  # fmt: skip


def rearranged(name: str, folder: Path, seed: int) -> World:
    """Two runs of the same program, which differ by noise alone."""
    runs = {
        side: tuple(diff_runs.trace_file(folder / f"{side}{n}.json", 10 * seed + n + first) for n in range(2))
        for side, first in (("before", 0), ("after", 5))
    }
    kernels = tuple(part.kernel for part in diff_runs.STEP)
    return World(
        name,
        runs["after"],
        (
            Question("change:kernel", "Which kernel became slower since the run before? (none, if none did)", "none",
                     must_not=kernels),
            Question("change:total", "Did a step become slower, faster, or did it stay the same?", "same",
                     must_not=("slower", "faster")),
            Question(f"change:verdict:{kernels[2]}", f"Did {kernels[2]} become slower or faster?", "same",
                     must_not=("slower", "faster")),
        ),
        before=runs["before"],
    )  # fmt: skip


# ---- Traces that lack something


def lost(name: str, folder: Path, seed: int) -> World:
    """The profiler lost device work, or the clocks are wrong."""
    chosen = (
        faults.drop_every_tenth_kernel, faults.drop_window, faults.empty_step, faults.swapped,
        faults.clock_of_the_device, faults.one_long_execution,
    )[seed % 6]  # fmt: skip
    made = faults.KinetoFile.of(STACK if chosen is faults.drop_window else recording("torch_eager_rank0"))
    planted = chosen(made)
    path = made.written(folder / "trace.json")
    certain = tuple(LIMITS)
    return World(
        name,
        (path,),
        (
            Question("sound:sound", "Is the trace sound?", answer=False, must_not=(True,)),
            Question("sound:code", "Which rule of soundness does it violate most?", planted.code),
            Question("limit:verdict", "What limits a step?", "not_sound", must_not=certain),
            Question("late:rank", "Which rank makes the others wait?", UNKNOWN),
            Question("memory:peak_bytes", "How many bytes of GPU memory were allocated at the peak?", UNKNOWN),
            Question("change:kernel", "Which kernel became slower since the last run?", UNKNOWN),
        ),
        must_not_say=(_NO_INPUT_BOUND, r"(?i)\b(launch|host|gpu)-bound: the GPU is", _NO_LATE_RANK),
    )


def no_host(name: str, folder: Path, seed: int) -> World:
    """Kernels alone, as some profilers write them: the trace shows that the GPU waits, not why."""
    loop = Loop(parts(seed, us=(100, 300)), loader_us=1_500)
    largest = max(loop.parts, key=lambda part: part.us)
    ask = partial(Question, answer=UNKNOWN)
    return World(
        name,
        (loop.write(folder / "trace.json", host=False),),
        (
            Question("where:kernel", "Which kernel takes most GPU time?", largest.kernel),
            ask("where:label", "Which label takes most GPU time?"),
            ask("idle:cause", "For which cause is the GPU idle longest?"),
            ask("idle:place", "In which label of the program does the host keep the GPU waiting?"),
            ask("idle:line", _HOST_LINE),
            ask("gain:free_cause:loader", "By how many ns would a step be shorter if loading data took no time?"),
            ask("late:rank", "Which rank makes the others wait?"),
            ask("memory:peak_bytes", "How many bytes of GPU memory were allocated at the peak?"),
            ask("use:mfu", "Which share of the GPU's peak FLOP do the steps reach (MFU)?"),
        ),
        must_not_say=(_NO_INPUT_BOUND, r"(?i)\b(launch|host)-bound", _NO_LATE_RANK),
    )


# ---- Use of the GPU


def matmul(name: str, folder: Path, seed: int) -> World:
    """Matrix products and copies whose FLOP and bytes are counted by hand, on a GPU whose peaks are known."""
    draw = random.Random(seed)
    work = Work()
    m, n, k = (draw.randrange(8, 17) * 256 for _ in range(3))
    elements = draw.randrange(20, 60) * 1_000_000
    flop, moved = 2 * m * n * k, 3 * 2 * elements
    product_us = round(1e6 * flop / (BF16_TFLOPS * 1e12) / draw.uniform(0.5, 0.8), 3)
    copy_us = round(1e6 * moved / (GBPS * 1e9) / draw.uniform(0.5, 0.8), 3)
    for step in range(4):
        begin = work.host
        work.call("aten::mm", [[m, k], [k, n]], ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", product_us))
        work.call("aten::add", [[elements], [elements]], ("vectorized_elementwise_kernel_add", copy_us))
        work.host = work.now
        work.range(f"ProfilerStep#{step}", "user_annotation", begin, work.host)
    path = Path(folder / "trace.json")
    work.opened(folder)
    roofline_us = 1e6 * (flop / (BF16_TFLOPS * 1e12) + moved / (GBPS * 1e9))
    used = product_us + copy_us
    step_us = used + 2  # a gap of 1 us before each kernel
    return World(
        name,
        (path,),
        (
            Question("use:roofline_share", "Which share of the modelled GPU time would be needed at the roofline?",
                     roofline_us / used, within=0.01),
            Question("use:mfu", "Which share of the GPU's peak FLOP do the steps reach (MFU)?",
                     1e6 * flop / (BF16_TFLOPS * 1e12) / step_us, within=0.03),
            Question("use:flop", "How many FLOP did the trace's work need?", 4.0 * flop, within=0.01 * 4 * flop),
            Question("use:bound:aten::mm", "What bounds aten::mm: compute or memory?", "compute", must_not=("memory",)),
            Question("use:bound:aten::add", "What bounds aten::add: compute or memory?", "memory",
                     must_not=("compute",)),
            Question("use:l2_hit_share", "Which share of the reads hit the L2 cache?", UNKNOWN),
            Question("memory:peak_bytes", "How many bytes of GPU memory were allocated at the peak?", UNKNOWN),
            Question("late:rank", "Which rank makes the others wait?", UNKNOWN),
        ),
    )  # fmt: skip
