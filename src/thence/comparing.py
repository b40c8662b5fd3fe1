"""What a `Trace` offers for comparisons with others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thence.analysis.diff.compare import Diff
    from thence.analysis.diff.sample import Sample
    from thence.analysis.soundness.findings import Soundness
    from thence.model.attributed import Attributed

__all__ = ["Comparing"]


class Comparing:
    """Methods of a run that is compared with others."""

    @property
    def attributed(self) -> Attributed:
        """The selected part of the trace."""
        raise NotImplementedError

    @property
    def soundness(self) -> Soundness:
        """Whether the whole trace can carry figures."""
        raise NotImplementedError

    def sample(self, *, outliers: bool = False, causes: bool | None = None) -> Sample:
        """The steps of this run as a comparison takes them; it holds no activities.

        Args:
            outliers: whether outlying steps count.
            causes: whether to divide idle time by cause; None: if that takes little time.
        """
        from thence.analysis.diff.sample import sample

        return sample(self.attributed, self.soundness, outliers=outliers, causes=causes)

    def diff(self, after: Comparing) -> Diff:
        """What changed from this run to another; several runs a side go to `thence.analysis.diff.compare`."""
        from thence.analysis.consistency_of_answers import consistent_diff
        from thence.analysis.diff.compare import compare

        return consistent_diff(compare([self.sample()], [after.sample()]))
