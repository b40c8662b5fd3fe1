"""Base class of `Trace` with the methods that compare it with other traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thence.analysis.diff.compare import Diff
    from thence.analysis.diff.sample import Sample
    from thence.analysis.soundness.findings import Soundness
    from thence.model.attributed import Attributed


class Comparing:
    """Methods that compare a run with others."""

    @property
    def attributed(self) -> Attributed:
        """The selected part of the trace."""
        raise NotImplementedError

    @property
    def soundness(self) -> Soundness:
        """Whether figures of the whole trace can be trusted."""
        raise NotImplementedError

    def sample(self, *, outliers: bool = False, causes: bool | None = None) -> Sample:
        """The steps of this run, summed up for a comparison; the result holds no device activities.

        Args:
            outliers: whether to keep outlier steps.
            causes: whether to divide idle time by cause; None: only if that takes little time.
        """
        from thence.analysis.diff.sample import sample

        return sample(self.attributed, self.soundness, outliers=outliers, causes=causes)

    def diff(self, after: Comparing) -> Diff:
        """What changed from this run to ``after``.

        To compare several runs on each side, pass their samples to `thence.analysis.diff.compare`.
        """
        from thence.analysis.consistency_of_answers import consistent_diff
        from thence.analysis.diff.compare import compare

        return consistent_diff(compare([self.sample()], [after.sample()]))
