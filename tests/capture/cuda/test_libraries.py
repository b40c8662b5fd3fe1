"""Which libcupti is used, and what its errors say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fake_cupti import library_path
from thence.capture.cuda import cupti, libraries
from thence.capture.cuda.cupti import CuptiError, load
from thence.errors import MissingRequirement


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any libcupti; the folder is on sys.path."""
    monkeypatch.delenv("THENCE_LIBCUPTI", raising=False)
    monkeypatch.setattr(libraries, "mapped_files", set)
    monkeypatch.setattr(libraries, "_in_toolkits", list)
    monkeypatch.setattr(libraries, "_NAMES", ())
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(libraries.site, "getsitepackages", list)
    monkeypatch.setattr(libraries.site, "getusersitepackages", lambda: "")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


def put(folder: Path, name: str) -> str:
    """A file where a wheel has it."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return str(path)


@pytest.mark.usefixtures("nowhere")
def test_without_any_the_way_to_get_one_is_named() -> None:
    with pytest.raises(MissingRequirement, match="pip install nvidia-cuda-cupti"):
        libraries.find_libcupti()


@pytest.mark.parametrize(("driver", "chosen"), [(None, 0), (13, 0), (14, 0), (12, 1)])
def test_the_newest_that_the_driver_serves(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, driver: int | None, chosen: int
) -> None:
    wheels = [put(nowhere, "nvidia/cu13/lib/libcupti.so.13"), put(nowhere, "nvidia/cuda_cupti/lib/libcupti.so.12")]
    monkeypatch.setattr(libraries, "served_cuda", lambda: driver and (driver, 0))
    assert libraries.find_libcupti() == wheels[chosen]


def test_the_copy_that_the_process_has_loaded_comes_first(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(nowhere, "nvidia/cu13/lib/libcupti.so.13")
    loaded = {"/opt/somewhere/libcupti.so.12", "/usr/lib/libc.so.6"}
    monkeypatch.setattr(libraries, "mapped_files", lambda: loaded)
    assert libraries.find_libcupti() == "/opt/somewhere/libcupti.so.12"


def test_the_one_that_is_named_comes_before_all(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(nowhere, "nvidia/cu13/lib/libcupti.so.13")
    monkeypatch.setenv("THENCE_LIBCUPTI", library_path())
    assert load().path == library_path()


def test_a_library_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/proc/self/maps").read_text().split("libc.so.6")[0].split()[-1] + "libc.so.6"
    monkeypatch.setenv("THENCE_LIBCUPTI", path)
    with pytest.raises(MissingRequirement, match="is not a libcupti"):
        load()


def test_errors_carry_call_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THENCE_LIBCUPTI", library_path())
    loaded = load()
    assert loaded.callback_name(2, 2) == "cudaLaunchKernel_v7000"
    assert loaded.callback_name(2, 4000) is None
    with pytest.raises(CuptiError, match="cuptiUnsubscribe failed with CUPTI error 1") as caught:
        loaded.unsubscribe(12345)
    assert (caught.value.call, caught.value.code) == ("cuptiUnsubscribe", 1)
    with pytest.raises(CuptiError, match="has no cuptiGetGraphId: this libcupti is too old"):
        loaded.graph_id(1)


def test_without_a_driver_libcupti_is_not_called(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUPTI 13.2 overflows the stack there."""
    put(nowhere, "nvidia/cu13/lib/libcupti.so.13")

    def no_driver() -> None:
        raise MissingRequirement("there is no NVIDIA driver here")

    monkeypatch.setattr(cupti, "load_driver", no_driver)
    monkeypatch.setattr(cupti, "_open", lambda path: pytest.fail(f"{path} was opened"))
    with pytest.raises(MissingRequirement, match="no NVIDIA driver"):
        load()
