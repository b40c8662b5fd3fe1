"""Modules, phases, steps and backward passes of a real PyTorch, on the CPU, noted without changing anything."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from launching import Launch, Watched  # noqa: E402
from thence.capture.boundaries.places import LINE, MODULE, PHASE, STEP  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12"),
    pytest.mark.usefixtures("method"),
]

KERNEL = """
import torch

class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(context, x, name):
        context.name = name
        launch(name)
        return x * 1

    @staticmethod
    def backward(context, gradient):
        launch(context.name + " backward")
        return gradient * 1, None

def kernel(x, name):
    return Kernel.apply(x, name)
"""
"""An operation that launches a kernel in forward and backward, in a library's code."""

MODEL = """
from torch import nn

class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n
        self.norm = nn.LayerNorm(4)
        self.act = Act(n)

    def forward(self, x):
        y = self.norm(x)
        y = kernel(y, f"block {self.n}")
        y = self.act(y)
        return kernel(x + y, f"sum {self.n}")

class Act(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n

    def forward(self, x):
        return kernel(x.sin(), f"act {self.n}")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(n) for n in range(3))

    def forward(self, x):
        x = kernel(self.inner(x), "net")
        for block in self.blocks:
            x = block(x)
        return kernel(x, "head")

torch.manual_seed(0)
net = Net()
x = torch.randn(2, 4)
"""
MODULES = {"net": "Net", "head": "Net"} | {
    f"{name} {n}": path
    for n in range(3)
    for name, path in (("block", f"blocks.{n}"), ("sum", f"blocks.{n}"), ("act", f"blocks.{n}.act"))
}


def watched(body: str, tmp_path: Path, **variables: Any) -> Watched:
    def kernel_of(launch: object) -> Any:
        library: dict[str, Any] = {"launch": launch}
        exec(compile(KERNEL, "/lib/site-packages/kernels.py", "exec"), library)
        return library["kernel"]

    source = "kernel = kernel_of(launch)\nimport torch\n" + MODEL + textwrap.dedent(body)
    given = {"kernel_of": kernel_of, **variables}
    return Watched(source, tmp_path / "program.py", modules=True, variables=given)


def name_of(program: Watched, launch: Launch, kind: int) -> str | None:
    place = program.place(launch, kind)
    return place.name if place is not None else None


def places(program: Watched, kind: int) -> dict[str, set[str | None]]:
    """Places of a kind by name of the launch."""
    found: dict[str, set[str | None]] = {}
    for launch in program.launches:
        found.setdefault(str(launch.name), set()).add(name_of(program, launch, kind))
    return found


def expected(suffix: str = "") -> dict[str, set[str | None]]:
    return {name + suffix: {path} for name, path in MODULES.items()}


def test_modules_have_the_paths_that_users_know(tmp_path: Path) -> None:
    program = watched("with torch.no_grad():\n    for _ in range(3): net(x)\nlaunch('outside')", tmp_path)
    assert places(program, MODULE) == expected() | {"outside": {None}}
    found = program.place(program.launches[3], MODULE)
    assert found is not None
    assert (found.name, found.detail) == ("blocks.0", "Block")
    parents = {p.name: program.known[p.parent].name for p in program.known.values() if p.kind == MODULE and p.parent}
    assert parents["blocks.1.act"] == "blocks.1"


def test_a_backward_kernel_has_module_line_and_chain_of_its_forward(tmp_path: Path) -> None:
    program = watched(
        """
        def train():
            for _ in range(3):
                out = net(x)
                loss = kernel(out.sum(), "loss")
                loss.backward()
                launch("after")
        train()
        """,
        tmp_path,
    )
    found = places(program, MODULE)
    for name, path in (expected() | expected(" backward") | {"loss": {None}, "after": {None}}).items():
        assert found[name] == path, name
    forward = {str(one.name): one for one in program.launches}
    for one in program.launches:
        name = str(one.name)
        made = forward[name.removesuffix(" backward")]
        backward = name.endswith("backward")
        assert program.chain(one) == list(made.stack), name
        assert not program.idle(one)
        phase = "backward" if backward else None if name == "after" else "forward"
        assert name_of(program, one, PHASE) == phase, name


def test_wrappers_do_not_blur_paths(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        program = watched(
            """
            net.blocks[0] = torch.compile(net.blocks[0], backend=lambda module, inputs: module.forward)
            torch._dynamo.config.disable = True
            net.blocks[1] = checkpoint_wrapper(net.blocks[1])
            model = torch.nn.parallel.DistributedDataParallel(net)
            for _ in range(2):
                model(x).sum().backward()
            torch._dynamo.config.disable = False
            """,
            tmp_path,
            checkpoint_wrapper=checkpoint_wrapper,
        )
    finally:
        torch._dynamo.config.disable = False
        distributed.destroy_process_group()
    found = places(program, MODULE)
    assert found == expected() | expected(" backward")


def test_shared_late_and_failing_modules(tmp_path: Path) -> None:
    program = watched(
        """
        net.blocks[2] = net.blocks[1]
        net.blocks[2].n = 1
        net(x)
        net.blocks.append(Block(7))
        net(x)

        class Fails(nn.Module):
            def forward(self, x):
                kernel(x, "fails")
                raise ValueError

        class Around(nn.Module):
            def __init__(self):
                super().__init__()
                self.inside = Fails()
            def forward(self, x):
                try:
                    self.inside(x)
                except ValueError:
                    return kernel(x, "caught")

        class Items(nn.Module):
            def forward(self, x):
                for i in range(2):
                    kernel(x, "item")
                    yield i

        other = Around()
        other(x)
        try: Fails()(x)
        except ValueError: launch("outside")
        items = Items()
        list(items(x))
        """,
        tmp_path,
    )
    found = places(program, MODULE)
    assert found["act 1"] == {"blocks.1.act"}
    assert found["act 7"] == {"blocks.3.act"}
    assert found["fails"] == {"Around.inside", "Fails"}
    assert found["caught"] == {"Around"}
    assert found["outside"] == {None}
    assert found["item"] == {None}  # a generator runs where it is consumed, after the call


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_recomputed(tmp_path: Path, reentrant: bool) -> None:
    program = watched(
        f"""
        from torch.utils.checkpoint import checkpoint
        class Checkpointed(Net):
            def forward(self, x):
                x = kernel(self.inner(x), "net")
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant={reentrant})
                return kernel(x, "head")
        net = Checkpointed()
        for _ in range(2):
            loss = net(x).sum()
            launch("between")
            loss.backward()
        """,
        tmp_path,
    )
    found = places(program, MODULE)
    for name in ("block 1", "act 1", "act 1 backward", "sum 2 backward"):
        assert found[name] == {MODULES[name.removesuffix(" backward")]}, name
    phases = [(str(one.name), name_of(program, one, PHASE)) for one in program.launches]
    half = phases[: len(phases) // 2]
    between = [name for name, _ in half].index("between")
    assert {phase for _, phase in half[:between]} == {"forward"}
    after = half[between + 1 :]
    assert {p for name, p in after if name.endswith("backward")} == {"backward"}
    again = {p for name, p in after if name.startswith(("block", "act")) and not name.endswith("backward")}
    assert again == {"recompute"}


TRAINING = """
from torch.optim import SGD
class Launching(SGD):
    def step(self, *args):
        launch("optimizer")
        return super().step(*args)
    def zero_grad(self, *args):
        return super().zero_grad(*args)
a, b = Launching(net.parameters(), 0.1), Launching(net.parameters(), 0.1)
def train(optimizers, times, accumulate=1):
    for i in range(times):
        for o in optimizers:
            for _ in range(accumulate):
                net(x).sum().backward()
            launch("clip?")
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            o.step()
            launch("stepped")
            o.zero_grad()
"""


def steps(program: Watched) -> list[int]:
    """Numbers of the launches right after which steps begin, 0 for none."""
    numbers = {number for number, place in program.known.items() if place.kind == STEP}
    rows = program.rows
    launched = sorted(one.counter for one in program.launches)
    return [
        max((one for one in launched if one <= counter), default=0)
        for counter, place in zip(rows["counter"].tolist(), rows["place"].tolist(), strict=True)
        if place in numbers
    ]


def test_an_optimizer_ends_a_step(tmp_path: Path) -> None:
    program = watched(TRAINING + "train([a], 4, accumulate=2)", tmp_path)
    assert places(program, PHASE)["optimizer"] == {"optimizer"}
    assert places(program, PHASE)["stepped"] == {None}
    stepped = [one.counter for one in program.launches if one.name == "optimizer"]
    # The first step begins with the recording. Before an optimizer has stepped, the second call of the model begins
    # one, which readers leave out once an optimizer has.
    _, called, *ended = steps(program)
    assert ended == stepped
    assert called < stepped[0]
    noted = {place.name for place in program.known.values() if place.kind == PHASE}
    assert {"gradient", "optimizer", "backward", "forward"} <= noted


def test_a_closure_of_the_optimizers_step_has_phases_of_its_own(tmp_path: Path) -> None:
    """As Lightning trains, and as optimizers that evaluate a model several times need it."""
    program = watched(
        """
        from torch.optim import SGD

        class Launching(SGD):
            @torch.no_grad()
            def step(self, closure):
                launch("before")
                with torch.enable_grad():
                    loss = closure()
                launch("update")
                return loss

        optimizer = Launching(net.parameters(), 0.1)

        def closure():
            optimizer.zero_grad()
            loss = net(x).sum()
            launch("loss")
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
            launch("after")
        """,
        tmp_path,
    )
    phases = places(program, PHASE)
    assert phases["block 0"] == phases["head"] == phases["loss"] == {"forward"}
    assert phases["block 0 backward"] == phases["head backward"] == {"backward"}
    assert phases["before"] == phases["update"] == {"optimizer"}
    assert phases["after"] == {None}


def test_generation_and_rewards_are_phases_around_the_modules_that_they_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In modules of the names that libraries have, which are made up here; benchmarks run the libraries."""
    made = {
        "transformers.generation.utils": (
            "class GenerationMixin:\n    @torch.no_grad()\n    def generate(self):\n        return net(x)\n"
        ),
        "trl.trainer.grpo_trainer": (
            "class GRPOTrainer:\n    def _calculate_rewards(self):\n        launch('reward')\n"
        ),
    }
    for name, source in made.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            # Noted by monkeypatch, so that the module is not left there after the test.
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), torch)
            del sys.modules[".".join(parts[:depth])]
        folder = tmp_path.joinpath("library", *parts[:-1])
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder.parent / "__init__.py").touch()
        (folder / f"{parts[-1]}.py").write_text("import torch\n" + source)
    monkeypatch.syspath_prepend(tmp_path / "library")
    program = watched(
        """
        import transformers.generation.utils as generation, trl.trainer.grpo_trainer as grpo
        generation.net, generation.x, grpo.launch = net, x, launch
        for _ in range(2):
            generation.GenerationMixin().generate()
            launch("between")
            grpo.GRPOTrainer()._calculate_rewards()
            net(x).sum().backward()
        """,
        tmp_path,
    )
    phases = places(program, PHASE)
    assert phases["block 0"] == {"generation", "forward"}
    assert phases["between"] == {None}
    assert phases["reward"] == {"reward"}
    assert phases["block 0 backward"] == {"backward"}


def test_of_several_optimizers_the_last_one_ends_a_step(tmp_path: Path) -> None:
    program = watched(TRAINING + "train([a, b], 4)", tmp_path)
    stepped = [one.counter for one in program.launches if one.name == "optimizer"]
    # The second turn of the first one shows that it is not alone.
    assert steps(program)[2:] == stepped[3::2]


@pytest.mark.parametrize("enabled", [True, False])
def test_with_a_gradient_scaler_a_step_ends_with_its_update(tmp_path: Path, enabled: bool) -> None:
    """Also the steps in which it leaves out the optimizer's, because gradients overflowed."""
    program = watched(
        TRAINING
        + f"""
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled={enabled})
for i in range(4):
    scaler.scale(net(x).sum()).backward()
    for p in net.parameters():
        p.grad *= float("inf") if i == 1 else 1
    scaler.step(a)
    launch("scaler stepped")
    scaler.update()
    a.zero_grad()
""",
        tmp_path,
    )
    optimized = [one for one in program.launches if one.name == "optimizer"]
    assert len(optimized) == (3 if enabled else 4)
    updated = [one.counter for one in program.launches if one.name == "scaler stepped"]
    assert steps(program)[1:] == updated


def test_accumulated_gradients_are_a_phase_of_their_own(tmp_path: Path, method: str) -> None:
    program = watched(
        """
        net.inner.weight.register_post_accumulate_grad_hook(lambda p: launch("accumulated"))
        for _ in range(2):
            net(x).sum().backward()
        """,
        tmp_path,
    )
    found = [name_of(program, one, PHASE) for one in program.launches if one.name == "accumulated"]
    # The first one only puts the gradient there, which the number of a leaf's node does not tell.
    assert found == ["gradient" if method == "numbers" else "backward", "gradient"]


def test_serving_is_told_by_the_tokens(tmp_path: Path) -> None:
    program = watched(
        """
        class Language(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(9, 4)
            def forward(self, input_ids):
                return kernel(self.table(input_ids), "table")
        model = Language()
        with torch.no_grad():
            model(input_ids=torch.zeros(2, 7, dtype=torch.int64))
            for _ in range(3):
                model(input_ids=torch.zeros(2, 1, dtype=torch.int64))
        """,
        tmp_path,
    )
    said = [(place.detail if (place := program.place(one, STEP)) else None) for one in program.launches]
    assert said == ["prefill batch=2 tokens=7"] + ["decode batch=2 tokens=1"] * 3
    assert len(steps(program)) == 4
    assert places(program, PHASE)["table"] == {"other"}


def test_the_program_may_say_where_steps_begin(tmp_path: Path) -> None:
    program = watched(TRAINING + "step()\ntrain([a], 4)\nstep()\n", tmp_path)
    assert len(steps(program)) == 2


def test_where_cuda_is_in_use_the_first_step_begins_with_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the program is at its beginning, and what makes the model is no part of a step."""
    program = TRAINING + 'kernel(torch.ones(2), "made")\ntrain([a], 2)\n'
    without = steps(watched(program, tmp_path))
    assert without[0] > 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert steps(watched(program, tmp_path)) == [0, *without[1:]]


def test_what_is_compiled_stays_the_same(tmp_path: Path) -> None:
    """The graphs, their breaks, keys of Inductor's cache, and the results to the bit."""
    body = """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.codecache import compiled_fx_graph_hash
    def compiled(model):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        graphs = []
        def compiler(module, inputs):
            graphs.append((module.code, compiled_fx_graph_hash(module, inputs, {}, [])[0]))
            return make_boxed_func(module.forward)
        backend = aot_autograd(fw_compiler=compiler)
        torch.manual_seed(1)
        plain = torch.nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        function = torch.compile(plain, backend=backend)
        optimizer = torch.optim.AdamW(plain.parameters())
        for _ in range(3):
            loss = function(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        explained = torch._dynamo.explain(plain)(x)
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        return graphs, breaks, explained.graph_count, explained.graph_break_count, float(loss.detach())
    results.append(compiled(None))
    hooks.stop()
    results.append(compiled(None))
    """
    results: list[Any] = []
    given = {"results": results, "kernel_of": lambda _launch: None}
    source = "import torch\n" + MODEL + textwrap.dedent(body)
    Watched(source, tmp_path / "program.py", modules=True, variables=given, between=True)
    assert results[0] == results[1]
    assert len(results[0][0]) == 2  # forward and backward
    assert results[0][1:4] == (0, 1, 0)


def test_lines_of_the_backward_pass_without_lines(tmp_path: Path) -> None:
    """Modules alone, as with --without lines."""
    source = MODEL.replace("kernel(", "(lambda x, n: x)(") + "net(x).sum().backward()\n"
    program = Watched("import torch\n" + source, tmp_path / "program.py", modules=True, lines=False)
    kinds = {place.kind for place in program.known.values() if place.name is not None}
    assert kinds == {MODULE, PHASE, STEP}
    assert not [p for p in program.known.values() if p.kind == LINE and p.name]
