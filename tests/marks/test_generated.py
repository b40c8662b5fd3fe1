"""What the lines of code that Inductor generated were made of."""

from __future__ import annotations

import json
import sys

from thence.marks.generated import GeneratedCode, facts_of_lines

# The layout of torch 2.11's generated code, shortened.
CODE = """# AOT ID: ['0_forward']
import torch
# Topologically Sorted Source Nodes: [gelu], Original ATen: [aten.gelu], thence: [["mlp"]]
triton_poi_fused_gelu_0 = async_compile.triton('triton_poi_fused_gelu_0', '...')
class Runner:
    def call(self, args):
        arg0, = args
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
            # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.addmm], thence: [["a", "b"], ["c"]]
            stream0 = get_raw_stream(0)
            extern_kernels.addmm(arg0, buf0, alpha=1, out=buf0)
            # Unsorted Source Nodes: [x], Original ATen: [aten.sin]
            triton_poi_fused_sin_1.run(buf0, 32, stream=stream0)
            triton_poi_fused_gelu_0.run(buf0, 32, stream=stream0)
            del arg0
            other_library.launch(buf0)
"""


def test_a_comment_belongs_to_the_next_launch_else_that_of_the_definition_does() -> None:
    lines = CODE.splitlines(keepends=True)
    found = {
        lines[n - 1].strip().split("(")[0]: facts for n, facts in facts_of_lines(lines).items()
    }
    paths = {launch: path for launch, (path, _) in found.items()}
    assert paths == {
        "extern_kernels.addmm": ("a", "b"),
        "triton_poi_fused_sin_1.run": (),
        "triton_poi_fused_gelu_0.run": ("mlp",),
    }
    facts = json.loads(found["extern_kernels.addmm"][1])
    assert facts == {"Original ATen": "aten.addmm", "Source Nodes": "linear", "marks": ["a/b", "c"]}


def test_comments_of_others_are_left_alone() -> None:
    for comment in ("thence: what follows", "thence: [1, 2", "thence: 7", ""):
        line = f"# Source Nodes: [x], Original ATen: [aten.mm], {comment}\n"
        facts = facts_of_lines([line, "extern_kernels.mm(a, b)\n"])
        assert facts[2][0] == ()


def test_a_debugger_is_not_disturbed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", object())
    notes: list[str] = []
    code = GeneratedCode(lambda _frame: None, lambda: None, notes.append)
    before = sys.gettrace()

    def tracer(*_args: object) -> None:
        return None

    sys.settrace(tracer)
    try:
        code.start()
        code.stop()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert len(notes) == 1
    assert "debugger" in notes[0]
