"""Makes the reference pages of the site from what they describe; nothing of them is kept in the repository.

A page for each verb from its help, the tables from `thence.model.tables`, the kinds of place, the exit codes, and
the JSON keys that the verbs really print. ``python docs/make_reference.py FOLDER`` writes them; ``make docs`` puts
them into the site (docs/site_hooks.py).
"""

from __future__ import annotations

import argparse
import functools
import re
from pathlib import Path

import polars as pl
from json_keys import ANYWHERE, MAPS, meaning
from json_samples import Keys, keys_of, verbs_with_json

from thence.analysis.idle.host_causes import MEANINGS
from thence.cli.manual import EXIT_CODES, Option, Verb, program, verbs
from thence.cli.output import SCHEMAS
from thence.errors import ThenceError
from thence.model import tables
from thence.model.attributed import SHARES
from thence.model.places import KINDS
from thence.model.tables import Table

VERBS = "reference/verbs"


def pages() -> dict[str, str]:
    """Paths below docs/ and Markdown of every page."""
    everything = verbs()
    made = {f"{VERBS}/{verb.name}.md": _verb_page(verb) for verb in everything}
    made[f"{VERBS}/index.md"] = _verbs_page(everything)
    made["reference/tables.md"] = _tables_page()
    made["reference/kinds.md"] = _kinds_page()
    made["reference/json.md"] = _json_page()
    made["reference/exit_codes.md"] = _exit_codes_page()
    return made


def names() -> list[str]:
    """Paths of every page, without making any."""
    others = ("verbs/index", "tables", "kinds", "json", "exit_codes")
    return [*(f"{VERBS}/{verb.name}.md" for verb in verbs()), *(f"reference/{o}.md" for o in others)]


def undescribed() -> list[str]:
    """Verb and path of each JSON key that docs/json_keys.py does not describe."""
    return [f"{verb}: {path}" for verb in verbs_with_json() for path in _keys(verb) if meaning(verb, path) is None]


def _verbs_page(everything: tuple[Verb, ...]) -> str:
    rows = [f"| [`thence {v.name}`]({v.name}.md) | {_text(v.summary)} |" for v in everything]
    return "\n".join(
        [
            "# Verbs",
            "",
            *(_text(b.text) + "\n" for b in program().blocks if not b.text.startswith("Shell")),
            (
                "Every page holds what `--help` says, and is made from it. `man thence-report` shows "
                "the same where the "
                "package is installed and `man` knows its folder."
            ),
            "",
            "| verb | question |",
            "|---|---|",
            *rows,
            "",
            "## Options of the program",
            "",
            *_options(program().options),
            "",
            "Shell completion:",
            "",
            "```sh",
            'eval "$(_THENCE_COMPLETE=bash_source thence)"   # or zsh_source, fish_source',
            "```",
            "",
        ]
    )


def _verb_page(verb: Verb) -> str:
    lines = [f"# thence {verb.name}", "", _text(verb.summary), "", "```text"]
    lines += [f"thence {verb.name} {verb.usage}", "```", ""]
    for block in verb.blocks:
        lines += [f"## {block.heading}", ""] if block.heading == "Examples" else []
        lines += [f"{_text(block.heading)}:", ""] if block.heading not in ("", "Examples") else []
        lines += ["```text", block.text, "```", ""] if block.verbatim else [_text(block.text), ""]
    lines += ["## Options", "", *_options(verb.options), ""]
    if verb.name in verbs_with_json():
        lines += ["## JSON", "", "Keys of `--format json`:", "", *_key_table(verb.name), ""]
    lines += ["## Exit code", ""]
    lines += [_exit_code_of(verb), ""]
    return "\n".join(lines)


def _exit_code_of(verb: Verb) -> str:
    if verb.name == "record":
        return "The exit status of the command. 2 where it could not be started. [All codes](../exit_codes.md)."
    return f"{'; '.join(f'**{code}**: {_text(text)}' for code, text in EXIT_CODES.items())}."


def _options(options: tuple[Option, ...]) -> list[str]:
    rows = [f"| {_code(option.written)} | {_text(option.meaning)} |" for option in options]
    return ["| option | meaning |", "|---|---|", *rows]


@functools.cache
def _keys(verb: str) -> Keys:
    return keys_of(verb, MAPS.get(verb, ()))


def _key_table(verb: str) -> list[str]:
    rows = [
        f"| `{path}` | {', '.join(sorted(kinds))} | {_text(meaning(verb, path) or 'not described')} |"
        for path, kinds in _keys(verb).items()
    ]
    return ["| key | type | meaning |", "|---|---|---|", *rows]


_TABLES = """\
# Tables and columns

What `trace.tables.gpu`, `trace.tables.host` and the other frames hold, and what `thence sql` and Parquet files show. \
All times are int64 nanoseconds on the trace's own clock. A null means that the trace does not say. Columns that hold \
a row of another table count from 0.

This page is made from `model/tables.py` and `model/attributed.py`.
"""
_PLACES = """
## places

One row for each row of `gpu`, in its order: where it came from. `activities` in SQL is `gpu` and `places` side by \
side. For each [kind of place](kinds.md) that a launch or an HLO instruction tells there are two columns: the place, \
null where there is none, and `<kind>_rule`, a code of [rules and reasons](../reasons.md). Beside them:

| column | type | unit and meaning |
|---|---|---|
| `launch` | Int32 | row in host of the call that launched it |
| `position` | Enum | whether the number in `source` is a `line`, or where a `function` begins |
| `lane`, `metadata` | Categorical | metadata of marks in addition to their names |
| `detail` | String | a sentence about a CUDA graph that could not be matched |
| `separate` | Enum | why tables of XLA traces show it in a separate row: warm_up, incomplete, autotuning |

## shares

How the time of an activity divides among source lines (fusions of XLA); the weights of one activity sum to 1.
"""


def _tables_page() -> str:
    found = [table for table in vars(tables).values() if isinstance(table, Table)]
    lines = [_TABLES, *(line for table in found for line in _table(table))]
    lines += ["## Words of columns", "", "| column | values |", "|---|---|"]
    lines += [
        f"| `{name}` | {', '.join(f'`{value}`' for value in values)} |"
        for name, values in (
            ("gpu.kind", tables.KINDS),
            ("host.category", tables.HOST_CATEGORIES),
            ("events.kind", tables.EVENT_KINDS),
            ("waits.kind", tables.WAIT_KINDS),
            ("events.known, waits.known", tables.KNOWN),
        )
    ]
    lines += [_PLACES, "| column | type |", "|---|---|"]
    lines += [f"| `{name}` | {_type(dtype)} |" for name, dtype in SHARES.items()]
    return "\n".join([*lines, ""])


def _table(table: Table) -> list[str]:
    """The section of one table."""
    return [
        f"## {table.name}",
        "",
        f"One row is {_text(table.meaning)}.",
        "",
        *_never_null(table),
        "| column | type | unit and meaning |",
        "|---|---|---|",
        *(f"| `{c.name}` | {_type(c.dtype)} | {_text(c.meaning)} |" for c in table.columns),
        "",
    ]


def _never_null(table: Table) -> list[str]:
    if not table.required:
        return []
    return [f"Never null: {', '.join(f'`{name}`' for name in table.required)}.", ""]


def _kinds_page() -> str:
    origins = {
        "launch": "the host ranges around its launch, and labels of CUDA graphs",
        "hlo": "its HLO instruction",
        "both": "its HLO instruction, else its launch",
        "gpu": "the activity itself",
        "collectives": "what it moved",
    }
    return "\n".join(
        [
            "# Kinds of place",
            "",
            (
                "What GPU time can be attributed to: the words of `--by`, and of `summary(by=)`. "
                "Each activity has one place "
                "of a kind at most, or a [reason](../reasons.md) why it has none."
            ),
            "",
            "| kind | what it is | what tells it |",
            "|---|---|---|",
            *(f"| `{k.name}` | {_text(k.meaning)} | {origins[k.origin]} |" for k in KINDS),
            "",
            "## Causes of idle time",
            "",
            "| cause | meaning |",
            "|---|---|",
            *(f"| `{cause}` | {_text(text)} |" for cause, text in MEANINGS.items()),
            "",
        ]
    )


def _json_page() -> str:
    lines = [
        "# JSON",
        "",
        (
            "`--format json` is a contract: keys stay, units are in the key (`_ns`, `_ms`, `_gbps`, "
            "`bytes`, `share` from 0 "
            "to 1), all rows and full names are there whatever `--top` says, and numbers are not "
            "rounded. New keys may "
            "come. Types are those found in recordings; `null` stands where a value is not known."
        ),
        "",
        (
            "Every document states its form as `schema`, a number for each verb. It is raised when a key is removed "
            "or renamed, or when the meaning, unit or type of its values changes, and the changelog says what "
            "changed. A script that checks it fails with a clear reason instead of misreading a figure: "
            """`jq 'if .schema == 1 then .busy_ns else error("another schema") end'`. """
            "Stable are the keys, the codes (`code`, `reason`, `cause`, `verdict`, `rule`) and the units; texts for "
            "people (`text`, `advice`, `notes`, `warnings`) may improve, and the order of keys means nothing. The "
            "answer of `thence sql` is a list of rows whose keys are the columns of the query, and states none."
        ),
        "",
        "| verb | schema |",
        "|---|---|",
        *(f"| `{verb}` | {number} |" for verb, number in SCHEMAS.items()),
        "",
        "## Keys that mean the same everywhere",
        "",
        "| key | meaning |",
        "|---|---|",
        *(f"| `{key}` | {_text(text)} |" for key, text in ANYWHERE.items()),
        "",
    ]
    lines += ["## Keys of each verb", ""]
    lines += [f"- [thence {verb}](verbs/{verb}.md#json)" for verb in verbs_with_json()]
    return "\n".join([*lines, ""])


def _exit_codes_page() -> str:
    lines = ["# Exit codes and errors", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {_text(text)} |" for code, text in EXIT_CODES.items()]
    lines += [
        "",
        "`thence record` exits with the code of its command.",
        "",
        "## Errors of the library",
        "",
        "All are below `thence.ThenceError`; the message is a sentence with the way out.",
        "",
        "| error | exit code | meaning |",
        "|---|---|---|",
    ]
    for error in _family(ThenceError):
        about = (error.__doc__ or "").partition("\n")[0]
        lines.append(f"| `{error.__name__}` | {error.exit_code} | {_text(about)} |")
    return "\n".join([*lines, ""])


def _family(error: type[ThenceError]) -> list[type[ThenceError]]:
    public = [child for child in error.__subclasses__() if child.__module__ == ThenceError.__module__]
    return [error, *(inner for child in public for inner in _family(child))]


def _type(dtype: pl.DataType | type[pl.DataType]) -> str:
    if isinstance(dtype, pl.Enum):
        return "Enum"
    if isinstance(dtype, pl.Struct):
        return "Struct"
    return str(dtype).partition("(")[0] if not isinstance(dtype, pl.Array) else "3 of UInt32"


def _text(text: str) -> str:
    """Text in a cell of a table: no character of it is taken for Markdown, double backquotes are code."""
    coded = re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))
    parts = coded.split("`")
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([\\*_|<>\[\]])", r"\\\1", parts[index])
    return "`".join(parts)


def _code(text: str) -> str:
    """Code in a cell: Python-Markdown takes no pipe in code for the end of the cell."""
    return f"`{text}`"


def main(folder: Path) -> None:
    """Writes the pages below a folder."""
    for name, text in pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes the reference pages.")
    parser.add_argument("folder", type=Path, help="where to write them")
    main(parser.parse_args().folder)
