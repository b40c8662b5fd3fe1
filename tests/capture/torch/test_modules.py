"""Paths of modules as users know them, whatever is wrapped around them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thence.capture.boundaries.places import Places  # noqa: E402
from thence.capture.torch.modules import ModulePaths, class_name, paths  # noqa: E402

nn = torch.nn


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)


class Net(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))


def wrapper(name: str, attribute: str, *bases: type, **more: Any) -> Any:
    """A class that keeps a module in an attribute."""

    def __init__(self: Any, inner: Any) -> None:  # noqa: N807
        nn.Module.__init__(self)
        setattr(self, attribute, inner)
        for key, value in more.items():
            setattr(self, key, value)

    return type(name, bases or (nn.Module,), {"__init__": __init__})


def test_paths_are_those_of_named_modules() -> None:
    net = Net()
    assert list(paths(net)) == list(net.named_modules())


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("DistributedDataParallel", "module"),
        ("FullyShardedDataParallel", "_fsdp_wrapped_module"),
        ("OptimizedModule", "_orig_mod"),
        ("CheckpointWrapper", "_checkpoint_wrapped_module"),
    ],
)
def test_wrappers_leave_no_part(name: str, attribute: str) -> None:
    net = Net()
    plain = {id(module): path for path, module in net.named_modules()}
    wrapping = wrapper(name, attribute)
    net.layers[1] = wrapping(net.layers[1])
    wrapped = wrapping(net)
    found = {id(module): path for path, module in paths(wrapped)}
    assert {key: found[key] for key in plain} == plain
    assert class_name(wrapped) == "Net"
    assert found[id(net.layers[1])] == "layers.1"


def test_a_module_of_the_users_that_is_called_module_stays() -> None:
    holder = wrapper("Holder", "module")(Net())
    assert "module.layers.0.proj" in dict(paths(holder))


def test_models_of_peft() -> None:
    """PeftModel.base_model is a LoraModel, whose ``model`` is the user's."""
    base_tuner = wrapper("BaseTuner", "model")
    lora = wrapper("LoraModel", "model", base_tuner)
    peft = wrapper("PeftModel", "base_model", peft_config={})
    model = peft(lora(Net()))
    assert [path for path, _ in paths(model)][:4] == ["", "", "", "layers"]
    assert class_name(model) == "Net"


def test_what_fsdp2_puts_before_a_class() -> None:
    marker = type("FSDPModule", (), {})
    block = Block()
    block.__class__ = type("FSDPBlock", (marker, Block), {})
    assert class_name(block) == "Block"


def test_a_second_model_has_its_class_before_its_paths() -> None:
    places = Places()
    named = ModulePaths(places)
    generator, critic = Net(), Net()
    names = [
        places[named.number(one, 0)].name
        for one in (generator, critic, nn.CrossEntropyLoss())
        for one in (one, *(one.layers if isinstance(one, Net) else ()))
    ]
    assert names == [
        *("Net", "layers.0", "layers.1"),
        *("Net_1", "Net_1.layers.0", "Net_1.layers.1"),
        "CrossEntropyLoss",
    ]


def test_a_part_that_was_called_first_is_named_by_the_whole() -> None:
    places = Places()
    named = ModulePaths(places)
    net = Net()
    assert places[named.number(net.layers[0].proj, 0)].name == "Linear"
    named.number(net, 0)
    assert places[named.number(net.layers[0].proj, 0)].name == "layers.0.proj"


def test_modules_that_are_made_for_every_call_are_not_looked_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places()
    named = ModulePaths(places)
    net = Net()
    around = named.number(net, 0)
    searches: list[object] = []
    search = named._path_in_models
    monkeypatch.setattr(named, "_path_in_models", lambda *a: searches.append(a) or search(*a))
    names = {places[named.number(nn.ReLU(), around)].name for _ in range(300)}
    assert names == {"Net.ReLU"}
