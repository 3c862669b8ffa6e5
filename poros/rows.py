"""A user's rows as they lie in a file: found, read, checked and converted, in plain Python.

`poros check` reads a file where nothing else is installed, so nothing here imports `datasets`.
Every row keeps its place (`where`), because a fault that a chat template or TRL finds later must
still name a line. The loaders of `datasets` were not used: they infer one type for a column, fill
missing keys with nulls and report a broken line by its block of bytes, so a fault of line 7
becomes a null in training or an error without a line.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from poros.errors import DataError

FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "oasst": ("message_id", "role", "text"),
    "text": ("text",),
}
"""Every data format and the columns a row of it must have."""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "alpaca": ("input",),
    "oasst": ("parent_id", "rank", "deleted"),
}
"""Columns that are used where a row has them."""

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
_SHAREGPT_ROLES = _ROLES | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
_OASST_ROLES = {"prompter": "user", "user": "user", "assistant": "assistant"}
_TYPES = {
    type(None): "null",
    str: "a string",
    list: "an array",
    dict: "an object",
    bool: "true or false",
    int: "a number",
    float: "a number",
}
_SHOWN_FAULTS = 5
_ROWS_PER_READ = 1000

Place = tuple[str, Any]  # where a row lies, such as "faq.jsonl line 3", and the row


@dataclasses.dataclass(frozen=True)
class DataSummary:
    """What was found in a source; the token counts are known once TRL has tokenised the rows.

    `rows` counts training rows (a thread of messages is one); it is None for a source that could
    not be read here, and `notes` says why. `columns` are the columns that are used.
    """

    source: str
    data_format: str
    rows: int | None
    columns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tokens: int | None = None
    trainable_tokens: int | None = None

    def __str__(self) -> str:
        """One line for people, then a line for each note."""
        if self.rows is None:
            return "\n".join([f"{self.source}: not checked", *self.notes])
        line = f"{self.source}: {self.rows} {self.data_format} rows ({', '.join(self.columns)})"
        if self.tokens is not None:
            line += f", {self.tokens} tokens, {self.trainable_tokens} of them learned"
        return "\n".join([line, *self.notes])


def check_file(source: str, data_format: str = "auto") -> DataSummary:
    """Check a source as `load_rows` does, without building a dataset and without a network.

    A hub id is not checked, nor is a parquet file where pyarrow is missing: `rows` is then None.

    Raises:
        DataError: as for `load_rows`.
    """
    path = local_path(source)
    if path is None:
        note = "a hub dataset is read when training starts"
        return DataSummary(source, data_format, None, notes=(note,))
    if any(file.suffix.lower() == ".parquet" for file in data_files(path)):
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            note = "reading parquet needs pyarrow: pip install pyarrow"
            return DataSummary(source, data_format, None, notes=(note,))
    reader = RowReader(source, data_format)
    for _ in reader.examples(file_places(path, reader)):
        pass
    return reader.finish()


# Finding the source


def local_path(source: str) -> Path | None:
    """The file or folder of a source, or None for a hub id."""
    path = Path(source).expanduser()
    if source.strip() and path.exists():
        return path
    suffix = path.suffix.lower()
    looks_local = (
        source.startswith((".", "/", "~"))
        or "\\" in source
        or source.count("/") > 1
        or (suffix and difflib.get_close_matches(suffix, _FILE_TYPES, 1, cutoff=0.7))
    )
    if looks_local:
        folder = "" if path.parent.is_dir() else f", nor a folder {path.parent}"
        raise DataError(f"no such file: {source}{folder}{near_names(path)}")
    return None


def near_names(path: Path) -> str:
    """A line with the names in its folder that are most like this one, or nothing."""
    if not path.parent.is_dir():
        return ""
    names = [entry.name for entry in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, 3)
    return f"\nnear it: {', '.join(near)}" if near else ""


def data_files(path: Path) -> list[Path]:
    """The data files of a path: itself, or those in the folder, by name."""
    known = ", ".join(_FILE_TYPES)
    if path.is_file():
        if path.suffix.lower() not in _FILE_TYPES:
            raise DataError(
                f"{path}: the file type {path.suffix or '(none)'} is not read\n"
                f"next: convert it to one of {known}"
            )
        return [path]
    if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        raise DataError(
            f"{path} is a folder of Dataset.save_to_disk, which is not read\n"
            "next: write its rows with Dataset.to_json(FILE.jsonl) or Dataset.to_parquet"
        )
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in _FILE_TYPES)
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        raise DataError(
            f"{path}: wanted a folder of data files of one type ({known}), found {found}\n"
            "next: name one file"
        )
    return files


# Rows as they lie in the source. A file that is no file of its type raises; a bad row is a fault.


def file_places(path: Path, reader: RowReader) -> Iterator[Place]:
    """The rows of a file, or of the files of a folder, as they lie there."""
    for file in data_files(path):
        try:
            yield from _FILE_TYPES[file.suffix.lower()](file, reader)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _lines(file: Path, reader: RowReader) -> Iterator[tuple[str, str]]:
    """`(where, line)` of every line that is not blank; only a line feed ends a line."""
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            where = f"{file.name} line {number}"
            if number == 1 and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DataError(f"{file} is UTF-16\nnext: save it as UTF-8")
            try:
                line = raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
            except UnicodeDecodeError as error:
                byte = f"0x{raw[error.start]:02x}"
                reader.fault(where, f"not UTF-8: byte {byte} at position {error.start + 1}")
                continue
            if line.strip():
                yield where, line


def _json_places(file: Path, reader: RowReader) -> Iterator[Place]:
    with file.open("rb") as stream:
        head = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if head == b"[":
        rows = _whole_json(file)
        yield from ((f"{file.name} row index {index}", row) for index, row in enumerate(rows))
        return
    num_lines = 0
    for where, line in _lines(file, reader):
        num_lines += 1
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            if num_lines == 1 and file.suffix.lower() == ".json" and _is_json(file):
                raise DataError(
                    f"{file} is one JSON object over several lines\n"
                    "next: write the rows as one array, [{...}, {...}], or one row a line"
                ) from None
            reader.fault(where, _json_reason(error))


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def _whole_json(file: Path) -> list[Any]:
    try:
        rows = json.loads(file.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file} line {error.lineno}: {_json_reason(error)}\n"
            "the file starts with [, so it is read as one JSON array of rows"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: {_json_reason(error)}") from None
    assert isinstance(rows, list)  # it starts with [
    return rows


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return f"not JSON: {error}"


def _csv_places(file: Path, reader: RowReader) -> Iterator[Place]:
    # The default limit of 128 KiB a cell is below a long document; a C long bounds the limit.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with file.open(encoding="utf-8-sig", newline="") as stream:
        cells = csv.reader(stream, strict=True)
        try:
            header = next(cells, [])
            if len(set(header)) < len(header):
                raise DataError(f"{file} line 1: two columns have the same name: {header}")
            start = cells.line_num + 1
            for row in cells:
                where, start = f"{file.name} line {start}", cells.line_num + 1
                if row and len(row) != len(header):
                    reader.fault(where, f"{len(row)} cells, the header has {len(header)}")
                elif row:
                    yield where, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise DataError(f"{file} line {cells.line_num}: not CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} after line {cells.line_num}: not UTF-8: {error.reason}\n"
                "next: save it as UTF-8"
            ) from None


def _txt_places(file: Path, reader: RowReader) -> Iterator[Place]:
    for where, line in _lines(file, reader):
        yield where, {"text": line}


def _parquet_places(file: Path, reader: RowReader) -> Iterator[Place]:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        reader.settle(parquet.schema_arrow.names, file.name)
        wanted = [name for name in parquet.schema_arrow.names if name in reader.columns]
        index = 0
        for batch in parquet.iter_batches(batch_size=_ROWS_PER_READ, columns=wanted):
            for row in batch.to_pylist():
                yield f"{file.name} row index {index}", row
                index += 1
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not parquet: {error}") from None


_FILE_TYPES: dict[str, Callable[[Path, RowReader], Iterator[Place]]] = {
    ".jsonl": _json_places,
    ".ndjson": _json_places,
    ".json": _json_places,
    ".csv": _csv_places,
    ".parquet": _parquet_places,
    ".txt": _txt_places,
}


# From rows to examples


class _BadRow(Exception):
    """Why a row cannot be trained on; the reader adds where it lies."""


class RowReader:
    """Converts the rows of one source and remembers what it saw on the way."""

    def __init__(self, source: str, data_format: str) -> None:
        if data_format != "auto" and data_format not in FORMATS:
            raise DataError(
                f"data_format {data_format!r} is unknown\nnext: use auto, {', '.join(FORMATS)}"
            )
        self.source = source
        self.data_format = data_format
        self.columns: tuple[str, ...] = ()
        self._settled = False
        self._rows = 0
        self._cut = 0
        self._kind: tuple[tuple[str, type], ...] = ()
        self._notes: list[str] = []
        self._faults: list[str] = []
        self._num_faults = 0

    def fault(self, where: str, reason: str) -> None:
        """Remember a row that cannot be trained on."""
        self._num_faults += 1
        if len(self._faults) < _SHOWN_FAULTS:
            self._faults.append(f"  {where}: {reason}")

    def settle(self, columns: Sequence[str], where: str) -> None:
        """Decide the format by the columns of the first row."""
        if self._settled:
            return
        self._settled = True
        if self.data_format == "auto":
            self.data_format = _detect(columns, where)
            if self.data_format != "text" and "text" in columns and self.data_format != "oasst":
                self._notes.append(
                    f"read as {self.data_format}; the column text is ignored"
                    " (data_format: text would use it)"
                )
        used = FORMATS[self.data_format] + OPTIONAL.get(self.data_format, ())
        self.columns = tuple(name for name in used if name in columns)
        ignored = [name for name in columns if name not in used]
        if ignored:
            self._notes.append(f"ignored columns: {', '.join(ignored)}")

    def examples(self, places: Iterator[Place]) -> Iterator[dict[str, Any]]:
        """The rows as TRL takes them, with `where`; bad ones become faults."""
        rows = self._objects(places)
        first = next(rows, None)
        if first is None:
            return
        rows = itertools.chain([first], rows)
        if self.data_format == "oasst":
            converted = self._threads(rows)
        else:
            converted = self._converted(rows)
        for where, example in converted:
            kind = tuple((key, type(value)) for key, value in example.items())
            self._kind = self._kind or kind
            if kind != self._kind:
                self.fault(where, "strings and message lists are mixed with those of other rows")
                continue
            self._rows += 1
            yield {"where": where, **example}

    def finish(self) -> DataSummary:
        """What was found, once all examples were read.

        Raises:
            DataError: there were faults, or no row at all.
        """
        if self._num_faults:
            lines = list(self._faults)
            if self._num_faults > len(lines):
                lines.append(f"  and {self._num_faults - len(lines)} more")
            rows = "1 bad row" if self._num_faults == 1 else f"{self._num_faults} bad rows"
            raise DataError(
                "\n".join([f"{self.source}: {rows}", *lines, "next: mend or remove what is named"])
            )
        if not self._rows:
            raise DataError(
                f"{self.source} has no row to train on\nnext: check that this is the file you meant"
            )
        notes = list(self._notes)
        if self._cut:
            notes.append(
                f"{self._cut} conversations end without an answer: what follows the last"
                " assistant turn is cut"
            )
        return DataSummary(self.source, self.data_format, self._rows, self.columns, tuple(notes))

    def _objects(self, places: Iterator[Place]) -> Iterator[tuple[str, dict[str, Any]]]:
        for where, row in places:
            if not isinstance(row, dict):
                self.fault(where, f"the row is {_kind(row)}, wanted an object")
                continue
            self.settle(list(row), where)
            yield where, row

    def _converted(self, rows: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[Place]:
        convert = {
            "text": _text,
            "prompt-completion": _prompt_completion,
            "messages": self._messages,
            "sharegpt": self._sharegpt,
            "alpaca": _alpaca,
        }[self.data_format]
        for where, row in rows:
            try:
                yield where, convert(row)
            except _BadRow as error:
                self.fault(where, str(error))

    def _messages(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"messages": self._answered(_turns(row, "messages", _ROLES))}

    def _sharegpt(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"messages": self._answered(_turns(row, "conversations", _SHAREGPT_ROLES))}

    def _answered(self, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        """The turns up to the last answer: there is no answer to learn after it."""
        end = len(turns)
        while end and turns[end - 1]["role"] != "assistant":
            end -= 1
        if not end:
            raise _BadRow("no assistant turn: there is nothing to learn")
        self._cut += end < len(turns)
        return turns[:end]

    def _threads(self, rows: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[Place]:
        """One thread a message tree: the best-ranked reply at every turn, up to the last answer.

        Every path from root to leaf would repeat the upper turns once for each leaf below them,
        and the answers that people ranked lower would be learned as well as the best one. This
        is the selection of the QLoRA paper (https://arxiv.org/abs/2305.14314, OASST1).
        """
        nodes: dict[str, tuple[str, str, str]] = {}  # id -> where, role, text
        children: dict[str | None, list[tuple[float, str]]] = {}  # parent id -> rank, id
        deleted = 0
        for where, row in rows:
            if row.get("deleted"):
                deleted += 1
                continue
            try:
                name = _string(row, "message_id")
                role = _role(_string(row, "role"), "role", _OASST_ROLES)
                text = _string(row, "text")
                parent = None if row.get("parent_id") is None else _string(row, "parent_id")
                rank = row.get("rank")
                if rank is not None and not isinstance(rank, int | float):
                    raise _BadRow(f"rank is {_kind(rank)}, wanted a number or null")
                if name in nodes:
                    raise _BadRow(f"message_id {name} is taken by {nodes[name][0]}")
            except _BadRow as error:
                self.fault(where, str(error))
                continue
            nodes[name] = where, role, text
            order = float("inf") if rank is None else float(rank)
            children.setdefault(parent, []).append((order, name))
        threads = 0
        for _, root in children.get(None, []):
            path = [root]
            while replies := children.get(path[-1]):
                # min keeps the first of equals: replies without a rank stay in file order.
                path.append(min(replies, key=lambda reply: reply[0])[1])
            turns = [{"role": nodes[name][1], "content": nodes[name][2]} for name in path]
            wrong = next(
                (i for i, turn in enumerate(turns) if turn["role"] != ("user", "assistant")[i % 2]),
                None,
            )
            if wrong is not None:
                wanted = "prompter" if wrong % 2 == 0 else "assistant"
                self.fault(
                    nodes[path[wrong]][0],
                    f"is turn {wrong + 1} of its thread, wanted role {wanted}",
                )
                continue
            turns = turns[: len(turns) // 2 * 2]
            if turns:
                threads += 1
                yield nodes[path[len(turns) - 1]][0], {"messages": turns}
        linked = _count_linked(children)
        self._notes.append(
            f"{len(nodes)} messages became {threads} threads: one a tree, the best-ranked reply at"
            " every turn"
        )
        if deleted:
            self._notes.append(f"{deleted} messages are marked deleted and were left out")
        if linked < len(nodes):
            self._notes.append(
                f"{len(nodes) - linked} messages hang on a parent that is not in the data and were"
                " left out"
            )


def _count_linked(children: Mapping[str | None, list[tuple[float, str]]]) -> int:
    """How many messages can be reached from a root."""
    linked, waiting = 0, [name for _, name in children.get(None, [])]
    while waiting:
        linked += 1
        waiting += [name for _, name in children.get(waiting.pop(), [])]
    return linked


def _detect(columns: Sequence[str], where: str) -> str:
    """The format of rows with these columns; `text` counts only where nothing else fits."""
    fits = [name for name, keys in FORMATS.items() if set(keys) <= set(columns)]
    if len(fits) > 1 and "text" in fits:
        fits.remove("text")
    if len(fits) == 1:
        return fits[0]
    known = "\n".join(f"  {name}: {', '.join(keys)}" for name, keys in FORMATS.items())
    what = f"fit several formats: {', '.join(fits)}" if fits else "fit no known format"
    raise DataError(
        f"{where}: the columns {', '.join(columns) or '(none)'} {what}\n"
        f"known formats and the columns they need:\n{known}\n"
        + ("next: set data_format" if fits else "next: rename the columns")
    )


def _kind(value: object) -> str:
    return _TYPES.get(type(value), type(value).__name__)


def _string(row: Mapping[str, Any], key: str, name: str = "") -> str:
    """The string under a key, which must say something."""
    name = name or key
    if key not in row:
        raise _BadRow(f"no key {name} (found: {', '.join(map(str, row)) or 'none'})")
    value = row[key]
    if not isinstance(value, str):
        raise _BadRow(f"{name} is {_kind(value)}, wanted a string")
    if not value.strip():
        raise _BadRow(f"{name} is empty")
    return _whole(value, name)


def _whole(value: str, name: str) -> str:
    """The string, which must have a UTF-8 form: tokenizers and Arrow take no other."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = value[error.start]
        raise _BadRow(
            f"{name} has half of a character (\\u{ord(half):04x}) at position {error.start + 1}"
        ) from None
    return value


def _role(value: str, name: str, roles: Mapping[str, str]) -> str:
    if value not in roles:
        raise _BadRow(f"{name} is {value!r}, wanted one of {', '.join(roles)}")
    return roles[value]


def _turns(row: Mapping[str, Any], key: str, roles: Mapping[str, str]) -> list[dict[str, str]]:
    """The conversation under a key as `role` and `content`."""
    if key not in row:
        raise _BadRow(f"no key {key} (found: {', '.join(map(str, row)) or 'none'})")
    value = row[key]
    if not isinstance(value, list):
        raise _BadRow(f"{key} is {_kind(value)}, wanted an array of turns")
    if not value:
        raise _BadRow(f"{key} is empty")
    return [_turn(turn, f"{key}[{index}]", roles) for index, turn in enumerate(value)]


def _turn(turn: Any, name: str, roles: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise _BadRow(f"{name} is {_kind(turn)}, wanted an object")
    # ShareGPT files come with both pairs of names.
    sharegpt = roles is _SHAREGPT_ROLES and turn.get("role") is None
    role_key, content_key = ("from", "value") if sharegpt else ("role", "content")
    role = _role(_string(turn, role_key, f"{name}.{role_key}"), f"{name}.{role_key}", roles)
    if turn.get("tool_calls"):
        raise _BadRow(f"{name} has tool_calls, which are not trained on yet")
    content = turn.get(content_key)
    if isinstance(content, list):
        content = _joined(content, f"{name}.{content_key}")
    if role in ("system", "tool") and content == "":
        return {"role": role, "content": ""}  # says: no system text; the tool returned nothing
    found = {**turn, content_key: content} if content_key in turn else turn
    return {"role": role, "content": _string(found, content_key, f"{name}.{content_key}")}


def _joined(parts: list[Any], name: str) -> str:
    """The text of content that is written as parts: [{"type": "text", "text": ...}]."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            found = part.get("type") if isinstance(part, dict) else _kind(part)
            raise _BadRow(f"{name} has a part that is {found}, wanted text only")
    return "".join(_string(part, "text", f"{name}.text") for part in parts)


def _text(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"text": _string(row, "text")}


def _prompt_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    if not (isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list)):
        return {"prompt": _string(row, "prompt"), "completion": _string(row, "completion")}
    prompt, completion = _turns(row, "prompt", _ROLES), _turns(row, "completion", _ROLES)
    if prompt[-1]["role"] == "assistant":
        raise _BadRow("prompt ends in an assistant turn, wanted a user or tool turn")
    if completion[-1]["role"] != "assistant":
        raise _BadRow(f"completion ends in a {completion[-1]['role']} turn, wanted assistant")
    return {"prompt": prompt, "completion": completion}


def _alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """As messages, so that the model's own chat template frames it, not the one of Alpaca."""
    question = _string(row, "instruction")
    more = row.get("input")
    if more is not None and more != "":
        question += "\n\n" + _string(row, "input")
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": _string(row, "output")}],
    }
