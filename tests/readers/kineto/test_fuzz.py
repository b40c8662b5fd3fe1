"""Real files, cut and corrupted at random: whatever happens, it is an error of thence or a trace."""

from __future__ import annotations

import gzip
import json
import random
from typing import TYPE_CHECKING

import pytest

import thence
from helpers import examples, recording, unzipped
from thence.readers.kineto.events import decode

if TYPE_CHECKING:
    from pathlib import Path

TRIES = examples(40)
"""Of each change; fuzz/ changes small traces in many more ways."""
TOKENS = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\n", b"\x00", b"\xff", b"null", b"NaN", b"-inf", b"1e999",
    b"-1", b"99999999999999999999999", b"{}", b"[[", b'"traceEvents":[', b'{"ph":"X"}', b"\xef\xbb\xbf", b"},\n{",
    b'"ts":', b'"pid":"[TP01] 5"', b"true", b'"ph": "X"', b"\\u0000", b"\\ud800", b"0.1234567",
)  # fmt: skip


def shortened(name: str, every: int) -> bytes:
    """A recording with one of so many events, every argument kept, laid out by json.dumps."""
    document = json.loads(unzipped(recording(name)))
    document["traceEvents"] = document["traceEvents"][::every]
    return json.dumps(document, indent=1).encode()


def cut(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(len(content))]


def flipped(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice((1, 3, 30))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def spliced(content: bytes, dice: random.Random) -> bytes:
    """Tokens put in, in place of as many bytes as it happens."""
    for _ in range(dice.choice((1, 3, 10))):
        at = dice.randrange(len(content))
        content = content[:at] + dice.choice(TOKENS) + content[at + dice.choice((0, 1, 4, 40)) :]
    return content


def reordered(content: bytes, dice: random.Random) -> bytes:
    """A stretch moved elsewhere."""
    low, high = sorted(dice.randrange(len(content)) for _ in range(2))
    at = dice.randrange(len(content))
    stretch, rest = content[low:high], content[:low] + content[high:]
    return rest[:at] + stretch + rest[at:]


def replaced_values(content: bytes, dice: random.Random) -> bytes:
    """Some numbers of the JSON replaced by other values, so that it stays JSON."""
    pieces = content.split(b": ")
    for _ in range(dice.choice((1, 10, 100))):
        at = dice.randrange(1, len(pieces))
        head, comma, rest = pieces[at].partition(b",")
        if head.strip().replace(b".", b"").isdigit():
            value = dice.choice((b"-5", b'"x"', b"null", b"[1]", b"1e300", b"{}", b"18446744073709551615"))
            pieces[at] = value + comma + rest
    return b": ".join(pieces)


CHANGES = (cut, flipped, spliced, reordered, replaced_values)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
def test_a_damaged_file_gives_a_trace_or_an_error_of_thence(change: object, packed: bool, tmp_path: Path) -> None:
    dice = random.Random(f"{change}".split(" at ")[0])
    contents = (
        unzipped(recording("graph_replay_rank0"))[:30_000],
        unzipped(recording("torch-2.12_graph_replay_rank0"))[:30_000],
        shortened("torch_eager_rank0", 200),
        shortened("torch_fsdp_rank0", 200),
    )
    path = tmp_path / "trace.json"
    for number in range(TRIES // (4 if packed else 1)):
        content = change(contents[number % len(contents)], dice)  # type: ignore[operator]
        if packed:
            content = flipped(gzip.compress(content, 1, mtime=0), dice)
        path.write_bytes(content)
        try:
            trace = thence.open(path)
            if trace.recorded.gpu.height and number % 5 == 0:
                trace.self_check()
        except thence.ThenceError as error:
            assert str(path) in str(error)  # noqa: PT017 - most tries raise nothing
        except Exception as error:  # noqa: BLE001 - whatever it is, the input is to be kept
            kept = tmp_path / "failing"
            kept.write_bytes(content)
            pytest.fail(f"{type(error).__name__}: {error} (try {number}; kept as {kept})")


@pytest.mark.parametrize("change", CHANGES[1:], ids=lambda change: change.__name__)
def test_a_damaged_piece_is_decoded_without_an_exception(change: object) -> None:
    dice = random.Random(7)
    document = json.loads(unzipped(recording("torch_fsdp_rank1")))["traceEvents"]
    pieces = [json.dumps(document[at : at + 8], indent=1).encode() for at in range(0, 9000, 450)]
    for number in range(examples(200)):
        piece = pieces[number % len(pieces)]
        columns = decode(b"[" + change(piece[1:-1], dice) + b"]")  # type: ignore[operator]
        assert 0 <= columns["damaged"] <= columns["events"]
