"""What the lines of code that Inductor generated launch, from its comments."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from thence.capture.marks.generated import read_module
from thence.capture.marks.launch_facts import Part, comment_of

# The layout of torch 2.11's generated code, shortened.
CODE = """# AOT ID: ['0_forward']
import torch
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0, = args
        args.clear()
        # {mm}
        buf0 = empty((4, 8))
        buf1 = empty((4, 8))
        mm(arg0, buf0, out=buf1)
        # {gelu}
        gelu(buf1)
        del arg0
        (buf2,) = partition_0([buf1])
        return (buf2, )

def partition_0(args):
    buf1, = args
    # {softmax}
    softmax(buf1)
    # {nothing}
    unknown(buf1)
    return (buf1, )
"""
MM = Part("mlp", ("m.py:1 forward",), "aten.mm", "forward", 1.0)
GELU = MM._replace(op="aten.gelu")
SOFTMAX = Part(None, ("m.py:9 forward",), "aten.softmax", "forward", 1.0)

# That of code without our comments, as a cache has it that was filled without us.
OLD = """# AOT ID: ['7_{kind}']
# Topologically Sorted Source Nodes: [gelu], Original ATen: [aten.gelu]
triton_poi_fused_gelu_0 = async_compile.triton('triton_poi_fused_gelu_0', '...')
cpp_fused_1 = async_compile.cpp_pybinding([], '...')
class Runner:
    def call(self, args):
        # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.t, aten.mm]
        stream0 = get_raw_stream(0)
        extern_kernels.mm(arg0, buf0, out=buf0)
        # Unsorted Source Nodes: [x], Original ATen: [aten.sin]
        triton_poi_fused_sin_1.run(buf0, 32, stream=stream0)
        triton_poi_fused_gelu_0.run(buf0, 32, stream=stream0)
        cpp_fused_1(buf0)
        other_library.launch(buf0)
        return ()
"""


def loaded(text: str, tmp_path) -> tuple[ModuleType, list[str]]:
    """The module, and the lines of its file."""
    path = tmp_path / "generated.py"
    path.write_text(text)
    module = ModuleType("generated")
    module.__file__ = str(path)
    module.async_compile = SimpleNamespace(  # type: ignore[attr-defined]
        triton=lambda *_: None, cpp_pybinding=lambda *_: None
    )
    text = text.replace("import torch\n", "\n")
    exec(compile(text, str(path), "exec"), vars(module))
    return module, text.split("\n")


def test_the_first_line_that_runs_after_a_comment_has_its_facts(tmp_path) -> None:
    parts = {"mm": (MM,), "gelu": (GELU, MM), "softmax": (SOFTMAX,), "nothing": ()}
    text = CODE.format(**{name: comment_of(known) for name, known in parts.items()})
    module, lines = loaded(text, tmp_path)
    found = read_module(module, lines, (), None)
    assert found is not None
    assert found.kind == "forward"
    assert found.entry is module.Runner.call.__code__
    assert {code.co_name for code in found.codes} == {"call", "partition_0"}
    by_line = {
        lines[number - 1].strip(): facts.parts for of_code in found.lines.values() for number, facts in of_code.items()
    }
    assert by_line == {
        "buf0 = empty((4, 8))": (MM,),
        "gelu(buf1)": (GELU, MM),
        "softmax(buf1)": (SOFTMAX,),
        "unknown(buf1)": (),
    }
    assert not any(facts.before for facts in found.first_facts())


def test_modules_that_are_no_compiled_graphs_are_left_alone(tmp_path) -> None:
    module, lines = loaded("def kernel():\n    # thence: []\n    pass\n", tmp_path)
    assert read_module(module, lines, (), None) is None


def old(kind: str, tmp_path, line_map, graph) -> dict[str, list[Part]]:
    module, lines = loaded(OLD.format(kind=kind), tmp_path)
    found = read_module(module, lines, line_map, graph)
    assert found is not None
    (facts,) = (of_code for of_code in found.lines.values() if of_code)
    assert all(one.before for one in facts.values())
    return {lines[number - 1].strip().split("(")[0]: list(one.parts) for number, one in facts.items()}


def test_a_cache_filled_before_has_modules_by_its_nodes_and_lines_by_its_map(tmp_path) -> None:
    trace = 'File "/me/model.py", line {}, in forward\n  x'
    stack = {"a": ("L['self'].mlp.up", object)}
    linear = SimpleNamespace(name="linear", meta={"nn_module_stack": stack, "stack_trace": trace.format(5)})
    graph = SimpleNamespace(nodes=[linear])
    line_map = [(10, trace.format(6)), (13, "")]
    found = old("forward", tmp_path, line_map, graph)
    assert found == {
        "extern_kernels.mm": [Part("mlp.up", ("/me/model.py:5 forward",), "aten.mm", "forward", 1.0)],
        "triton_poi_fused_sin_1.run": [Part(None, ("/me/model.py:6 forward",), "aten.sin", "forward", 1.0)],
        "triton_poi_fused_gelu_0.run": [Part(None, ("/me/model.py:6 forward",), "aten.gelu", "forward", 1.0)],
        "cpp_fused_1": [Part(None, (), "", "forward", 1.0)],
    }


def test_the_modules_of_a_backward_from_a_cache_filled_before_are_not_guessed(tmp_path) -> None:
    stack = {"a": ("L['self'].mlp.up", object)}
    linear = SimpleNamespace(name="linear", meta={"nn_module_stack": stack})
    found = old("backward", tmp_path, [], SimpleNamespace(nodes=[linear]))
    assert {part.module for parts in found.values() for part in parts} == {None}
    assert {part.phase for parts in found.values() for part in parts} == {"backward"}
