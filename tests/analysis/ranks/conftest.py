"""The four ranks of a real FSDP2 job, read once for all tests of late ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import thence
from helpers import FSDP

if TYPE_CHECKING:
    from thence.analysis.ranks.answer import Job


@pytest.fixture(scope="session")
def fsdp() -> thence.Trace:
    return thence.open(*FSDP)


@pytest.fixture(scope="session")
def fsdp_job(fsdp: thence.Trace) -> Job:
    return fsdp.ranks()
