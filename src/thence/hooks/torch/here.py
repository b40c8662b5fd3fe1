"""What the hooks of eager code know of the calling thread: asked where compiled code begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thence.boundaries.places import LINE, MODULE, PHASE

if TYPE_CHECKING:
    from thence.hooks.torch.lines import Lines
    from thence.hooks.torch.modules import ModulePaths
    from thence.hooks.torch.threads import Threads

__all__ = ["Here"]


class Here:
    """The innermost places of the calling thread, a `thence.marks.generated_lines.Around`."""

    def __init__(self, threads: Threads, module_paths: ModulePaths, lines: Lines) -> None:
        self._threads = threads
        self._paths = module_paths
        self._lines = lines

    def current_module(self) -> str | None:
        """Path of the innermost module that is running; None where none is."""
        return self._paths.path(self._threads.now.module)

    def current_place(self, kind: int) -> int:
        """Number of the innermost place of a kind; 0 where nothing tells."""
        thread = self._threads.now
        return {MODULE: thread.module, LINE: thread.line, PHASE: thread.phase}.get(kind, 0)

    def is_own(self, file: str) -> bool:
        """Whether lines of a file are the user's."""
        return self._lines.is_own(file)
