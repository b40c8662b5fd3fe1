"""On a GPU: whether thence.jax.on_stream moves work, and whether thence sees where it ran.

Runs examples/jax_two_streams.py with and without on_stream, forward, backward and batched, each in a
process of its own since XLA reads its flags once, and judges the traces by ``GEMM>=2``.

    python tests/gpu/jax_streams.py [FOLDER for the traces]

Exits with 1 unless every moved program runs its GEMMs on two streams or more and its HLO says so,
and every other one on one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import thence
from support import documented_parser, folder_argument

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_two_streams.py"
ENVIRONMENT = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
ANNOTATED = "streams in the compiled program: "


def record(folder: Path, variant: str, options: list[str]) -> str:
    """Runs the example; what it says of the compiled program, such as ``(1,)``."""
    command = [sys.executable, str(EXAMPLE), str(folder), "--variant", variant, *options]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith(ANNOTATED)]
    if not said or not any(folder.rglob("*.xplane.pb")):
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return said[0].removeprefix(ANNOTATED)


def verdict(folder: Path, variant: str, moved: bool) -> bool:
    """Whether the trace of one program is as it must be."""
    annotated = record(folder, variant, [] if moved else ["--default"])
    trace = thence.open(folder)
    trace.self_check()
    result = trace.streams()
    (check,) = result.check("GEMM>=2")
    as_expected = check.ok is moved and annotated == ("(1,)" if moved else "()")
    name = f"{variant} {'on_stream' if moved else 'default'}"
    print(f"{'right' if as_expected else 'WRONG'}: {name}: compiled {annotated}; {check}")
    for device in result.concurrency:
        busy = dict(enumerate(device.busy_streams_ns, 1))
        print(f"       busy streams, ns: {busy}; overlaps: {dict(device.overlap_ns)}")
    print("       kernels:", trace.report("kernel").rows["short_name"].to_list())
    for note in (*result.notes, *trace.meta.warnings):
        print("       note:", note)
    return as_expected


def main() -> None:
    options = documented_parser(__doc__)
    folder_argument(options, "for the traces; a temporary one without it")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = given.folder or Path(temporary)
        verdicts = [
            verdict(root / f"{variant}_{'moved' if moved else 'default'}", variant, moved)
            for variant in ("forward", "grad", "vmap")
            for moved in (True, False)
        ]
    print(f"{verdicts.count(False)} of {len(verdicts)} wrong")
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
