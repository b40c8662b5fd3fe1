"""One truth: what attribution finds is what every analysis sees."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DATA, DIFFERENT, shared
from thence import analysis
from thence.attribution.attribute import attribute
from thence.model.places import PLACES
from thence.model.reasons import REASONS, RULES

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

JAX = DATA / "jax"
BUFFERED = JAX / "jax_single.xplane.pb.gz"  # a training step in command buffers
SINGLE = JAX / "jax_single_nocb.xplane.pb.gz"  # the same program without


def kernels_by_group(trace: thence.Trace) -> dict[str, int]:
    rows = trace.streams().rows.group_by(pl.col("group").cast(pl.String)).agg(pl.col("count").sum())
    return dict(rows.iter_rows())


def test_command_buffers_change_no_answer_about_hlo() -> None:
    """The same program with and without them, compiled twice: 30 of its conversions were fused once."""
    buffered, single = shared(BUFFERED), shared(SINGLE)
    for trace in (buffered, single):
        (check,) = trace.streams({"ln": "reduce_sum"}).check("ln==1")
        assert check.ok, check.reason
    ours, theirs = kernels_by_group(buffered), kernels_by_group(single)
    assert theirs["elementwise"] - ours["elementwise"] == single.tables.gpu.height - buffered.tables.gpu.height
    assert {**ours, "elementwise": 0} == {**theirs, "elementwise": 0}
    # Each HLO instruction that ran is one computation, whoever launched it.
    for trace in (buffered, single):
        kernels = trace.tables.gpu.filter(pl.col("kind") == "kernel")
        hlo = kernels.select("hlo", "program").filter(pl.col("hlo").is_not_null())
        names = trace.tables.programs["name"].gather(hlo["program"].cast(pl.UInt32))
        ran = set(zip(names.to_list(), hlo["hlo"].to_list(), strict=True))
        assert set(trace.spread(warm_up="keep").select("program", "operation").rows()) == ran


def test_the_resolved_instruction_is_in_the_table_of_activities() -> None:
    trace = shared(BUFFERED)
    assert trace.recorded.gpu["hlo"].null_count() > 900
    assert trace.tables.gpu["hlo"].null_count() == trace.tables.places["hlo"].null_count() == 0
    assert trace.tables.gpu["hlo"].cast(pl.String).equals(trace.tables.places["hlo"].cast(pl.String))


@pytest.mark.parametrize("path", [*DIFFERENT, BUFFERED, SINGLE], ids=lambda path: path.name)
def test_every_rule_is_a_code_that_fits_the_place(path: Path) -> None:
    places = shared(path).tables.places
    for kind in PLACES:
        rule = places[f"{kind}_rule"].cast(pl.String)
        known = places[kind].is_not_null()
        assert set(rule.filter(known)) <= set(RULES), kind
        assert set(rule.filter(~known)) <= set(REASONS), kind


@pytest.mark.parametrize("path", DIFFERENT, ids=lambda path: path.name)
def test_every_collective_has_its_kernel(path: Path) -> None:
    trace = shared(path)
    assert trace.tables.collectives["gpu"].null_count() == 0
    assert trace.tables.host_collectives["host"].null_count() == 0


def test_a_trace_is_attributed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from thence.attribution import attribute as module

    calls = []

    def counted(*arguments: object) -> Attributed:
        calls.append(arguments)
        return attribute(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "attribute", counted)
    trace = thence.open(JAX / "streams_moved.xplane.pb")
    trace.page()
    trace.timeline()
    trace.select(steps="0:2").report("hlo")
    assert len(calls) == 1


def test_analyses_take_what_is_attributed() -> None:
    """None takes the tables of a reader, in which attribution would have changed something."""
    folder = Path(analysis.__file__).parent
    names = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    for name in names:
        module = import_module(f"thence.analysis.{name}")
        for function in vars(module).values():
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                types = {str(p.annotation) for p in inspect.signature(function).parameters.values()}
                assert "Tables" not in types, f"{name}.{function.__name__}"
