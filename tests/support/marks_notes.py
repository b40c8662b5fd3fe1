"""A listener of marks that several test modules share."""

from __future__ import annotations

import threading


class Notes:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.names: dict[int, str] = {}
        self.opened_with: list[tuple[str, str | None, dict[str, object], int]] = []

    def opened(self, number, name, lane, metadata) -> None:
        assert number not in self.names
        self.names[number] = name
        self.events.append(("+", name))
        self.opened_with.append((name, lane, dict(metadata), threading.get_ident()))

    def closed(self, number) -> None:
        self.events.append(("-", self.names[number]))

    def backward_opened(self, number, name) -> None:
        self.events.append(("backward", number, name))

    def backward_closed(self) -> None:
        self.events.append(("backward over",))
