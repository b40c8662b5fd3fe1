"""Which files are the user's own code."""

from __future__ import annotations

import pytest

from thence.model.own_code import OwnCode, packages_shown, short_places

USERS = (
    "train.py",
    "model/net.py",
    "./model/net.py",
    "/home/user/project/train.py",
    "/home/user/torch/train.py",  # a folder that is called like a package
    "C:\\Users\\me\\train.py",
    "inside/profile.py",
    "<ipython-input-3-abc>",
)
OTHERS = (
    "torch/nn/modules/linear.py",
    "transformers/models/llama/modeling_llama.py",
    "vllm/v1/worker/gpu_worker.py",
    "threading.py",
    "/usr/lib/python3.12/threading.py",
    "/opt/venv/lib/python3.12/site-packages/mylib/net.py",
    "site-packages/transformers/llama.py",
    "/usr/local/lib/python3.10/dist-packages/praxis/layers/base_ops.py",
    "C:\\Python\\Lib\\site-packages\\mylib\\net.py",
    "<frozen importlib._bootstrap>",
    "<string>",
    "/tmp/torchinductor_user/ab/cabcd.py",
    "",
)


@pytest.mark.parametrize("file", USERS)
def test_files_of_the_user(file: str) -> None:
    assert OwnCode()(file)


@pytest.mark.parametrize("file", OTHERS)
def test_files_of_somebody_else(file: str) -> None:
    assert not OwnCode()(file)


def test_a_package_that_the_trace_shows_to_be_installed() -> None:
    files = ["mylib/net.py", "/opt/lib/python3.12/site-packages/mylib/ops.py", "train.py"]
    assert packages_shown(files) == ("mylib",)
    assert OwnCode()("mylib/net.py")
    own = OwnCode.of((), packages_shown(files))
    assert [own(file) for file in files] == [False, False, True]


@pytest.mark.parametrize(
    ("patterns", "file", "expected"),
    [
        (("transformers",), "transformers/models/llama.py", True),
        (("transformers",), "/venv/site-packages/transformers/llama.py", True),
        (("*/site-packages/mylib/*",), "/venv/site-packages/mylib/net.py", True),
        (("threading",), "threading.py", True),
        (("trans",), "transformers/models/llama.py", False),
        (("!mylib",), "mylib/net.py", False),
        (("!mylib", "mylib"), "mylib/net.py", True),
        (("*", "!torch"), "torch/nn/functional.py", False),
        (("*", "!torch"), "transformers/llama.py", True),
    ],
)
def test_patterns_override_the_rule(patterns: tuple[str, ...], file: str, expected: bool) -> None:
    assert OwnCode.of(patterns)(file) is expected


def test_places_are_relative_to_the_folder_of_the_programs_files() -> None:
    project, packages = "/home/user/project", "/usr/lib/python3.12/site-packages"
    places = {
        f"{project}/train.py:3 main": "train.py:3 main",
        f"{project}/model/net.py:7 Net.forward": "model/net.py:7 Net.forward",
        f"{packages}/torch/nn/functional.py:12 linear": "torch/nn/functional.py:12 linear",
        "relative/data.py:1 load": "relative/data.py:1 load",
        "<stdin>:4 <module>": "<stdin>:4 <module>",
    }
    assert short_places(places) == places
    assert short_places([f"{project}/train.py:3 main"]) == {f"{project}/train.py:3 main": "train.py:3 main"}


def test_places_that_would_become_equal_keep_their_paths() -> None:
    places = ["/home/a/train.py:3", "/opt/site-packages/train.py:3", "train.py:3"]
    short = short_places(places)
    assert len({*short.values()}) == 3
    assert short["train.py:3"] == "train.py:3"


def test_files_in_unrelated_folders_keep_their_paths() -> None:
    places = ["/home/a/train.py:3", "/opt/b/net.py:3"]
    assert short_places(places) == {place: place for place in places}
