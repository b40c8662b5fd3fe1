"""The tests of a module are found by its path: the folders of tests are those of the package."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import thence
from source_trees import import_statements

PACKAGE = Path(thence.__file__).parent
TESTS = Path(__file__).parents[1]
NO_ROOMS = {"browser", "data", "end_to_end", "fuzz", "style", "support"}
LARGE = 150
"""Lines above which a module has a test file, or a row in `ELSEWHERE`."""

FIGURES = "writers/page/test_report_page.py::test_figures_for_notebooks[plot_by]"
GRAPHS = "attribution/cuda_graphs/test_alignment.py"
CONSTITUENTS = "attribution/xla/test_constituents.py"
COMMAND_BUFFERS = "attribution/xla/test_command_buffers.py"
DIFF = "analysis/diff/test_compare.py"
SOUNDNESS = "analysis/soundness"
PROFILERS = f"{SOUNDNESS}/test_profiler_rules.py"
NSIGHT = "readers/nsight/test_read.py"
PERFETTO = "writers/timelines/perfetto/test_write.py"

ELSEWHERE = {
    "atomic_files.py": "model/test_atomic_files.py",
    "analysis/timelines/activity_details.py": "analysis/timelines/test_activity_timeline.py",
    "analysis/diff/conditions.py": f"{DIFF}::test_figures_are_those_counted_from_the_file",
    "analysis/diff/explanation.py": "analysis/diff/test_signs.py",
    "analysis/diff/gate.py": DIFF,
    "analysis/diff/sample.py": DIFF,
    "analysis/whatif/critical_path.py": "analysis/whatif/test_prediction.py",
    "analysis/expectations.py": "analysis/test_streams.py",
    "analysis/flame/tree.py": "analysis/flame/test_flame.py",
    "analysis/idle/places.py": "analysis/idle/test_causes.py::test_a_piece_has_the_place_of_its_own_host_row",
    "analysis/idle/rules.py": "analysis/idle/test_causes.py",
    "analysis/idle/table.py": "analysis/idle/test_causes.py::test_idle_by_each_kind_adds_up",
    "analysis/inside/summary.py": "end_to_end/test_inside.py::test_summary_by_range",
    "analysis/ranks/lateness.py": "analysis/ranks/test_job.py::test_real_ranks_are_late_as_counted_by_hand",
    "analysis/ranks/reasons.py": "analysis/ranks/test_job.py",
    "analysis/ranks/summary_collectives.py": (
        "analysis/ranks/test_summary.py::test_what_lies_between_collectives_is_what_the_file_says"
    ),
    "analysis/ranks/summary_tables.py": "analysis/ranks/test_summary.py",
    "analysis/soundness/evidence.py": f"{SOUNDNESS}/test_launch_rules.py::test_captured_launches_have_no_work",
    "analysis/summary.py": "attribution/test_launch_places.py::test_idle_is_span_minus_the_union_on_every_device",
    "analysis/summary_merge.py": "store/test_stored_trace.py::test_a_report_by_anything_is_that_of_the_files",
    "analysis/whatif/answers.py": (
        "analysis/whatif/test_prediction.py::test_without_changes_the_largest_gains_of_all_are_answered"
    ),
    "analysis/whatif/changes.py": "analysis/whatif/test_prediction.py",
    "analysis/whatif/edges.py": (
        "analysis/whatif/test_prediction.py::test_where_the_device_is_the_limit_the_loader_gains_nothing"
    ),
    "analysis/whatif/graph.py": "analysis/whatif/test_prediction.py",
    "analysis/whatif/health.py": (
        "analysis/whatif/test_prediction.py::test_an_interval_is_wider_the_more_of_the_step_the_host_decides"
    ),
    "cli/streams.py": "analysis/test_streams.py::test_json_keeps_its_contract",
    "attribution/host_rows.py": "attribution/test_launch_places.py::test_idle_is_span_minus_the_union_on_every_device",
    "attribution/cuda_graphs/captures.py": (
        "attribution/cuda_graphs/test_by_capture.py::test_overlapping_captures_take_the_calls_of_their_own_thread"
    ),
    "attribution/cuda_graphs/by_order.py": f"{GRAPHS}::test_what_cannot_be_told_apart_gets_no_label_but_the_reason",
    "attribution/cuda_graphs/eager_run.py": (
        "attribution/cuda_graphs/test_by_eager.py::test_an_eager_run_labels_every_repetition_inside_the_graph"
    ),
    "attribution/cuda_graphs/replays.py": (
        "attribution/cuda_graphs/test_by_sequence.py::"
        "test_a_damaged_replay_gets_no_false_label_and_keeps_the_others"
    ),
    "attribution/cuda_graphs/signatures.py": f"{GRAPHS}::test_edges_in_a_circle_are_refused",
    "attribution/cuda_graphs/topology.py": f"{GRAPHS}::test_what_cannot_be_told_apart_gets_no_label_but_the_reason",
    "attribution/stacks.py": "analysis/flame/test_flame.py::test_the_innermost_line_is_the_source_of_the_report",
    "attribution/xla/op_names.py": "attribution/xla/test_hlo_places.py",
    "attribution/xla/origins.py": "attribution/xla/test_hlo_places.py",
    "attribution/xla/schedules.py": f"{COMMAND_BUFFERS}::test_an_hlo_without_a_schedule_is_refused",
    "cli/inputs.py": "end_to_end/test_cli.py::test_several_ranks_count_as_such",
    "cli/inside.py": "end_to_end/test_inside.py::test_command_line_prints_json_csv_and_tables",
    "cli/output.py": "end_to_end/test_cli.py::test_csv_is_a_table_with_a_heading",
    "doctor/probe.py": "doctor/test_examine.py",
    "writers/page/ranks_page.py": "cli/test_ranks.py::test_the_page_is_written",
    "writers/text/ranks.py": "cli/test_ranks.py::test_the_first_screen_says_who_since_when_and_why",
    "model/server_steps.py": "analysis/steps/test_kinds.py::test_what_a_servers_name_of_a_step_says",
    "explanations.py": "analysis/steps/test_table.py::test_selected_steps_are_as_in_the_whole",
    "inside/clocks.py": "inside/test_formats.py",
    "inside/columns.py": "inside/test_formats.py::test_events_are_as_recorded",
    "inside/description.py": "inside/test_defects.py::test_limits_are_checked_before_the_launch",
    "inside/files.py": "inside/test_defects.py",
    "inside/formats/mosaic.py": "inside/test_formats.py::test_mosaic_scopes",
    "inside/formats/proton.py": "inside/test_formats.py::test_proton",
    "inside/formats/thence.py": "inside/test_formats.py::test_events_are_as_recorded",
    "inside/launches.py": "inside/test_cuda.py",
    "inside/ranges.py": "inside/test_defects.py::test_ranges_that_cross_keep_their_own_ends",
    "readers/recording/place_ranges.py": "readers/recording/test_counted.py",
    "notebook.py": "end_to_end/test_notebook_forms.py",
    "pictures.py": "writers/page/test_figure_svg.py::test_every_plot_has_a_picture",
    "marks/backward.py": "marks/test_marking_torch.py",
    "marks/frames.py": "marks/test_marking.py",
    "marks/watching.py": "marks/test_marking.py",
    "model/formats.py": "readers/recording/test_xla.py",
    "model/graph_labels.py": "attribution/cuda_graphs/test_join_labels.py::test_a_kernel_has_the_place_of_its_node",
    "model/places.py": "attribution/test_attribute.py",
    "model/selection.py": "analysis/test_select.py",
    "model/joined_tables.py": "analysis/collectives/test_clock_sync.py",
    "readers/jax/instruction_costs.py": f"{CONSTITUENTS}::test_cost_is_what_enters_and_leaves_the_kernel_and_flops",
    "readers/jax/shapes.py": "readers/jax/test_hlo.py::test_width_of_every_element_type",
    "readers/jax/stat_values.py": "readers/jax/test_xspace.py::test_stats_of_any_encoding",
    "readers/jax/xspace_events.py": "readers/jax/test_xspace.py::test_picoseconds_round_down_at_both_ends",
    "readers/kineto/envelope.py": "readers/kineto/test_events_properties.py",
    "readers/kineto/frames.py": "readers/kineto/test_quirks.py::test_metadata_after_the_events_counts",
    "readers/kineto/read.py": "readers/kineto/test_quirks.py::test_metadata_after_the_events_counts",
    "readers/nsight/activities.py": f"{NSIGHT}::test_copies_are_named_by_the_enums_or_without_them",
    "readers/nsight/folder.py": f"{NSIGHT}::test_folders_of_tables[arrow]",
    "readers/nsight/nccl.py": f"{NSIGHT}::test_payloads_of_nccl",
    "readers/nsight/ranges.py": f"{NSIGHT}::test_ranges_of_every_style",
    "readers/nsight/sqlite.py": "readers/nsight/test_sqlite_pages.py",
    "readers/nsight/sqlite_records.py": "readers/nsight/test_sqlite_pages.py",
    "readers/nsight/store.py": "readers/nsight/test_sqlite_pages.py",
    "readers/nsight/xla.py": f"{NSIGHT}::test_compile_times_come_from_the_ranges_of_xla",
    "readers/nsys_jax/archive.py": "readers/nsys_jax/test_read.py",
    "readers/nsys_jax/programs.py": "readers/nsys_jax/test_read.py::test_collectives_are_described_by_the_hlo",
    "readers/nsys_jax/projection.py": "readers/nsys_jax/test_read.py::test_collectives_are_described_by_the_hlo",
    "readers/kineto/repair.py": "readers/kineto/test_damage.py::"
    "test_an_event_gives_the_same_whatever_its_neighbours_are",
    "readers/plain_pickle.py": "readers/test_torch_annotations.py::"
    "test_pickles_made_to_collide_or_to_fill_the_memory_are_refused",
    "readers/recording/host.py": "readers/recording/test_read.py::test_marks_around_collectives_describe_their_kernels",
    "readers/recording/parts.py": f"{PROFILERS}::test_a_damaged_part_of_a_recording_is_a_finding",
    "importing.py": "hooks/test_importing.py",
    "cli/record.py": "launcher/test_launch.py::test_a_directory_is_never_written_over",
    "launcher/first_use.py": "launcher/test_launch.py",
    "readers/registry.py": "readers/kineto/test_damage.py::test_a_directory_without_traces_says_what_was_looked_for",
    "cuda/cupti.py": "cuda/test_libraries.py",
    "marks/graph_labels.py": "marks/test_captures.py",
    "marks/graph_nodes.py": "marks/test_captures.py::test_nodes_of_child_graphs_are_numbered_after_all_others",
    "recorder/counting.py": "recorder/test_session.py::test_launches_of_several_threads_at_once",
    "recorder/parts.py": "readers/recording/test_xla.py",
    "recorder/activity_parser.py": "cuda/test_layouts.py",
    "recording/mark_log.py": "readers/recording/test_read.py",
    "recording/record.py": "recorder/test_session.py::test_one_recording_at_a_time_and_another_one_afterwards",
    "hooks/torch/threads.py": "hooks/torch/test_backward.py",
    "boundaries/log.py": "boundaries/test_probe.py",
    "hooks/torch/following.py": "hooks/torch/test_stack_following.py",
    "hooks/torch/phases.py": "hooks/torch/test_backward.py",
    "hooks/jax/programs.py": "readers/recording/test_xla.py",
    "store/facts.py": "store/test_parts.py",
    "store/layout.py": "store/test_ingest.py",
    "store/store.py": "store/test_stored_trace.py",
    "store/task.py": "store/test_workers.py",
    "timing/compiled_jax.py": "timing/test_measure_jax.py",
    "timing/events_jax.py": "timing/test_measure_jax.py",
    "timing/kernel_times.py": "timing/test_measure.py",
    "trace.py": "attribution/test_attribute.py",
    "writers/flame/svg.py": "writers/test_flame_files.py::test_svg_says_what_it_does_not_draw",
    "writers/page/plots.py": FIGURES,
    "writers/page/report_sections.py": "writers/page/test_report_page.py::test_every_section_of_four_ranks",
    "writers/page/report_tables.py": "writers/page/test_report_page.py::test_a_long_table_is_cut_and_says_by_how_much",
    "writers/text/summary.py": "end_to_end/test_cli.py::test_top_limits_the_rows_and_says_what_is_hidden",
    "writers/timelines/perfetto/layout.py": f"{PERFETTO}::test_kernels_are_on_their_stream_with_their_times",
    "writers/timelines/perfetto/packets.py": f"{PERFETTO}::test_kernels_are_on_their_stream_with_their_times",
}  # fmt: skip
"""Modules without a test file of their name: the test file that imports the module, or a test that runs it."""


def large_modules() -> list[str]:
    paths = [path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    large = [path for path in paths if len(path.read_text().splitlines()) > LARGE]
    return sorted(path.relative_to(PACKAGE).as_posix() for path in large)


def own_tests(module: str) -> list[Path]:
    """Test files of the module's name in the mirrored folder."""
    path = Path(module)
    names = (f"test_{path.stem}.py", f"test_{path.stem}_properties.py")
    return [file for name in names if (file := TESTS / path.parent / name).exists()]


def imported(path: Path) -> set[str]:
    """Dotted names that a test file imports anywhere."""
    names = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_tests_mirror_the_tree() -> None:
    folders = {
        path.relative_to(TESTS).parent for path in TESTS.rglob("test_*.py")
    } - {Path(name) for name in NO_ROOMS}  # fmt: skip
    assert [folder for folder in sorted(folders) if not (PACKAGE / folder).is_dir()] == []
    assert not list(TESTS.glob("test_*.py")), "a test file belongs to a folder"


def test_a_large_module_has_tests_of_its_name_or_a_row_in_the_table() -> None:
    wrong = [name for name in large_modules() if bool(own_tests(name)) == (name in ELSEWHERE)]
    assert wrong == []


def test_the_table_names_large_modules_only() -> None:
    assert sorted(ELSEWHERE.keys() - set(large_modules())) == []


@pytest.mark.parametrize("module", [m for m, test in ELSEWHERE.items() if "::" not in test])
def test_the_file_that_the_table_names_imports_the_module(module: str) -> None:
    """By its name, or with a package whose ``__init__`` imports it."""
    *package, name = ("thence", *Path(module).with_suffix("").parts)
    names = imported(TESTS / ELSEWHERE[module])
    if ".".join(package) in names:
        names |= imported((PACKAGE / module).with_name("__init__.py"))
    assert ".".join((*package, name)) in names


def test_the_tests_that_the_table_names_are_there() -> None:
    rows = [test.partition("[")[0].split("::") for test in ELSEWHERE.values() if "::" in test]
    missing = [
        (file, name)
        for file, name in rows
        if name not in {node.name for node in ast.walk(tree(TESTS / file)) if isinstance(node, ast.FunctionDef)}
    ]
    assert missing == []


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
