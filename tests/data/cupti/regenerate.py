"""Write layouts.json: offsets, sizes and record sizes as the C compiler sees CUPTI's own headers; and pm_sampling.json,
the same of the structs for PM sampling, for the versions that have it and each layout once.

    python tests/data/cupti/regenerate.py --cuda /usr/local/cuda/include FOLDER...

Each FOLDER holds the ``include`` files of one version of the nvidia-cuda-cupti wheel
(``pip download --no-deps nvidia-cuda-cupti==13.0.85``, unpacked). Needs cc, and c++ for PM sampling.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

TIMES = ("start", "end")
PLACE = ("deviceId", "contextId", "streamId", "correlationId")
GRAPH = ("graphNodeId", "graphId")
RECORDS = {
    "CONCURRENT_KERNEL": (
        "Kernel",
        (
            "kind", *TIMES, *PLACE, *GRAPH, "registersPerThread", "gridX", "gridY", "gridZ", "blockX",
            "blockY", "blockZ", "staticSharedMemory", "dynamicSharedMemory", "name",
            "queued",
        ),
    ),
    "MEMCPY": (
        "Memcpy",
        ("kind", *TIMES, *PLACE, *GRAPH, "copyKind", "srcKind", "dstKind", "bytes"),
    ),
    "MEMCPY2": (
        "MemcpyPtoP",
        ("kind", *TIMES, *PLACE, *GRAPH, "copyKind", "srcKind", "dstKind", "bytes", "srcDeviceId",
         "dstDeviceId"),
    ),
    "MEMSET": ("Memset", ("kind", *TIMES, *PLACE, *GRAPH, "value", "bytes", "memoryKind")),
    "RUNTIME": (
        "API", ("kind", "cbid", *TIMES, "processId", "threadId", "correlationId", "returnValue")
    ),
    "MARKER": (
        "Marker",
        ("kind", "flags", "timestamp", "id", "objectKind", "objectId", "objectId.pt.processId",
         "objectId.pt.threadId", "name", "domain"),
    ),
    "SYNCHRONIZATION": (
        "Synchronization",
        ("kind", "type", *TIMES, "correlationId", "contextId", "streamId"),
    ),
    "MEMORY2": (
        "Memory",
        ("kind", "memoryOperationType", "memoryKind", "correlationId", "address", "bytes", "timestamp", "deviceId"),
    ),
    "OVERHEAD": (
        "Overhead",
        ("kind", "overheadKind", "objectKind", "objectId", "objectId.pt.processId",
         "objectId.pt.threadId", *TIMES),
    ),
}  # fmt: skip


def newest(header: str, stem: str) -> str:
    """The struct of the highest number: the one that this version of the library writes."""
    numbers = re.findall(rf"^\}} CUpti_Activity{stem}(\d*);", header, re.MULTILINE)
    return f"CUpti_Activity{stem}{max(numbers, key=lambda n: int(n or 1))}"


def layout(folder: Path, cuda: Path) -> dict[str, object]:
    """Everything of one version."""
    header = (folder / "cupti_activity.h").read_text(errors="replace")
    lines = []
    for kind, (stem, fields) in RECORDS.items():
        struct = newest(header, stem)
        lines.append(f'P("{kind}", "", CUPTI_ACTIVITY_KIND_{kind}, sizeof({struct}), "{struct}");')
        lines += [
            f'P("{kind}", "{field}", offsetof({struct}, {field}), sizeof((({struct}*)0)->{field}), "");'
            for field in fields
        ]
    program = "\n".join(
        (
            "#include <stdio.h>", "#include <stddef.h>", "#include <cupti_version.h>", "#include <cupti_activity.h>",
            '#define P(k, f, a, b, s) printf("%s %s= %d %d %s\\n", k, f, (int)(a), (int)(b), s)',
            "int main(void) {",
            'P("VERSION", "", CUPTI_API_VERSION, 0, "");',
            *lines, "return 0; }",
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "x.c")
        source.write_text(program)
        binary = Path(scratch, "x")
        subprocess.run(["cc", "-w", "-I", folder, "-I", cuda, source, "-o", binary], check=True)
        output = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
    result: dict[str, object] = {}
    records: dict[str, dict[str, object]] = {}
    for line in output.splitlines():
        place, _, values = line.partition("=")
        kind, _, field = place.partition(" ")
        first, second, *struct = values.split()
        if kind == "VERSION":
            result["version"] = int(first)
        elif not field.strip():
            records[kind] = {"kind": int(first), "bytes": int(second), "struct": struct[0], "fields": {}}
        else:
            records[kind]["fields"][field.strip()] = [int(first), int(second)]  # type: ignore[index]
    return {**result, "records": records}


PM_HEADERS = ("cupti_pmsampling.h", "cupti_profiler_host.h", "cupti_profiler_target.h", "cupti_target.h")
PM_STRUCTS = re.compile(
    r"CUpti_(PmSampling_\w+|Profiler_Initialize|Device_GetChipName|"
    r"Profiler_Host_(Initialize|Deinitialize|ConfigAddMetrics|GetConfigImage|GetConfigImageSize|GetNumOfPasses|"
    r"EvaluateToGpuValues))_Params"
)


def pm_layout(folder: Path, cuda: Path) -> dict[str, str]:
    """Of each struct: its size as callers state it, and field=offset of its fields."""
    lines = []
    for header in PM_HEADERS:
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", (folder / header).read_text(errors="replace"), flags=re.DOTALL)
        for struct in re.finditer(r"typedef struct \w+\s*\{(.*?)\}\s*(\w+);", text, re.DOTALL):
            if PM_STRUCTS.fullmatch(struct[2]):
                lines.append(f'printf("\\n{struct[2]} %zu", (size_t){struct[2]}_STRUCT_SIZE);')
                fields = re.findall(r"(\w+)\s*(?:\[[^]]*\])?\s*;", struct[1])
                lines += [f'printf(" {field}=%zu", offsetof({struct[2]}, {field}));' for field in fields]
    includes = ("<cstdio>", "<cstddef>", "<cuda.h>", "<cupti_result.h>", *(f"<{header}>" for header in PM_HEADERS))
    with tempfile.TemporaryDirectory() as scratch:
        source, binary = Path(scratch, "x.cpp"), Path(scratch, "x")
        source.write_text("".join(f"#include {i}\n" for i in includes) + "int main() {\n" + "\n".join(lines) + "}")
        subprocess.run(["c++", "-w", "-I", folder, "-I", cuda, source, "-o", binary], check=True)
        output = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
    return {name: rest for name, _, rest in (line.partition(" ") for line in output.splitlines() if line)}


def write_pm_sampling(folders: list[Path], cuda: Path) -> None:
    """Each layout of each struct, with the versions that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for folder in (folder for folder in folders if (folder / PM_HEADERS[0]).exists()):
        for struct, layout in pm_layout(folder, cuda).items():
            found.setdefault(struct, {}).setdefault(layout, []).append(folder.name)
    text = json.dumps(found, indent=1, sort_keys=True)
    Path(__file__).with_name("pm_sampling.json").write_text(text + "\n")


def main() -> None:
    """Write the table beside this file."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--cuda", type=Path, required=True)
    arguments.add_argument("folders", type=Path, nargs="+")
    options = arguments.parse_args()
    write_pm_sampling(options.folders, options.cuda)
    table = {folder.name: layout(folder, options.cuda) for folder in options.folders}
    text = json.dumps(table, separators=(",", ":")).replace('"records"', '\n"records"')
    Path(__file__).with_name("layouts.json").write_text(text.replace('}},"', '}},\n"') + "\n")


if __name__ == "__main__":
    main()
