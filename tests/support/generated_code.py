"""Modules as Inductor generates them, and as much of torch as following them needs."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from thence.capture.marks.launch_facts import comment_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thence.capture.marks.launch_facts import Part


def generated_module(folder: Path, kind: str, launches: Sequence[tuple[Part, ...]], name: str = "code") -> Any:
    """A loaded module whose ``call([launch])`` calls launch once for each of `launches`."""
    body = "".join(f"    # {comment_of(parts)}\n    launch()\n" for parts in launches)
    text = f"# AOT ID: ['0_{kind}']\ndef call(args):\n    launch, = args\n{body}    return ()\n"
    path = folder / f"{name}.py"
    path.write_text(text)
    module = ModuleType(name)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def fake_torch(node: Any = None, sequence: int = 1) -> Any:
    """torch with an autograd node that runs, if any, and the next number that it gives to one."""
    module: Any = ModuleType("torch")
    module._C = SimpleNamespace(_current_autograd_node=lambda: node)
    module.autograd = SimpleNamespace(_get_sequence_nr=lambda: sequence)
    return module
