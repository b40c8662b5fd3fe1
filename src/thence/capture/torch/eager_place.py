"""The places of the calling thread in eager code, queried where compiled code begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thence.capture.boundaries.places import LINE, MODULE, PHASE

if TYPE_CHECKING:
    from thence.capture.torch.modules import ModulePaths
    from thence.capture.torch.own_files import OwnFiles
    from thence.capture.torch.threads import Common, Threads


class Here:
    """The innermost places of the calling thread, a `thence.capture.marks.generated_lines.Around`."""

    def __init__(self, common: Common, threads: Threads, module_paths: ModulePaths, is_own: OwnFiles) -> None:
        self._common = common
        self._threads = threads
        self._paths = module_paths
        self._is_own = is_own

    def current_module(self) -> str | None:
        """Path of the innermost module that is running; None outside of all modules."""
        return self._paths.path(self._common.here(self._threads.now)[0])

    def current_place(self, kind: int) -> int:
        """Number of the innermost place of a kind; 0 if it is not known."""
        thread = self._threads.now
        module, line = self._common.here(thread)
        return {MODULE: module, LINE: line, PHASE: thread.phase}.get(kind, 0)

    def is_own(self, file: str) -> bool:
        """Whether lines of a file are the user's."""
        return self._is_own(file)
