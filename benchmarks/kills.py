"""Programs that end at random moments while they are recorded: what is lost, and whether the recording says so.

    python benchmarks/kills.py [--kills 200] [--longest 3.0] [--at-once 4] [--ending SIGKILL|SIGTERM|os._exit|...]

No GPU: the libcupti of the tests hands the recorder its records. Each program launches all the time and notes every
launch itself, so that what is lost is known. A recording states the most that can be lost, in seconds and
launches: the interval between two writes when it last wrote.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import documented_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from killed_programs import Killed

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "support")]


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--longest", type=float, default=3.0, help="seconds until a kill")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--ending", action="append", help="all of them by default")
    options = parser.parse_args()
    from fake_cupti import library_path
    from killed_programs import ENDINGS, killed

    library_path()
    chance = random.Random(0)
    endings = options.ending or list(ENDINGS)
    moments = [chance.uniform(0, options.longest) for _ in range(options.kills)]
    kinds = [endings[number % len(endings)] for number in range(options.kills)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.at_once) as pool:
        folders = [Path(scratch, str(number)) for number in range(options.kills)]
        for folder in folders:
            folder.mkdir()
        found = list(pool.map(killed, folders, moments, kinds))
    for ending in endings:
        _show(ending, [one for one, kind in zip(found, kinds, strict=True) if kind == ending])


def _show(ending: str, found: Sequence[Killed]) -> None:
    lost = [one for one in found if one.recorded < one.launched]
    late = [one.lost_seconds - one.stated_seconds for one in lost]
    print(f"{ending}: {len(found)} ends, {len(lost)} lost something; of these "
          f"{sum(one.told for one in lost)} say so")  # fmt: skip
    print(f"  recordings with a gap before their end: {sum(one.gap for one in found)}")
    print(f"  kernels with their mark, of those recorded: at least {min(one.labelled for one in found):.4f}")
    print(f"  lost: median {statistics.median(one.lost_seconds for one in found):.2f} s, at most "
          f"{max(one.lost_seconds for one in found):.2f} s; stated: at most "
          f"{max(one.stated_seconds for one in found):.2f} s")  # fmt: skip
    if lost:
        print(f"  lost more than stated: by time {sum(by > 0 for by in late)} (by at most {max(late):.2f} s), by "
              f"launches {sum(one.launched - one.recorded > one.stated for one in lost)}")  # fmt: skip


if __name__ == "__main__":
    main()
