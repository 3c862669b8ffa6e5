"""Rows as the `datasets.Dataset` that TRL's SFTTrainer takes, and the checks that need a tokenizer.

What TRL 1.16 makes of the columns (trl/trainer/sft_trainer.py, `_prepare_dataset`):

- `text`: the tokenizer's special tokens and one EOS are added; every token is learned.
- `prompt` + `completion`: only the completion is learned. Strings are joined as they are and get
  one EOS; message lists go through the chat template, whose end of turn is learned.
- `messages`: the whole conversation through the chat template; every token is learned.

Labels are built before padding, so a padding token that is also the EOS hides no learned EOS.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros.errors import DataError
from poros.rows import (
    DataSummary,
    Place,
    RowReader,
    check_file,
    file_places,
    local_path,
    near_names,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DataSummary",
    "check_file",
    "check_trainable",
    "ensure_chat_template",
    "load_rows",
    "split_eval",
]

_ROWS_PER_WRITE = 1000


def load_rows(
    source: str, *, split: str = "train", data_format: str = "auto"
) -> tuple[Dataset, DataSummary]:
    """Read, check and convert a hub dataset, a local file or a folder of files.

    Args:
        source: a .jsonl, .json, .csv, .parquet or .txt file, a folder of files of one of these
            kinds, or a hub dataset id; `id:config` picks a configuration of the hub dataset.
        split: split of a hub dataset.
        data_format: a key of `FORMATS`, or `auto` to decide by the columns.

    Returns:
        The dataset: `where` (string, the row's place in the source) beside `text` (string), or
        `prompt` and `completion` (strings, or lists of {role, content}), or `messages` (list of
        {role, content}). It lies in a temporary folder that is removed when Python exits, and so
        does what TRL's `map` derives from it: a changed file never meets an older cache.

    Raises:
        DataError: the source cannot be found or read, is empty, has columns of no known format,
            or has rows that cannot be trained on (the first few are named, all are counted).
    """
    path = local_path(source)
    reader = RowReader(source, data_format)
    if path is None:
        places = _hub_places(source, split, reader)
    else:
        places = file_places(path, reader)
    dataset = _to_dataset(reader.examples(places))
    summary = reader.finish()
    assert dataset is not None  # finish() raises where there was no row
    return dataset, summary


def split_eval(dataset: Dataset, eval_rows: int, seed: int) -> tuple[Dataset, Dataset]:
    """Hold `eval_rows` random rows out: `(train, held_out)`, the same ones for the same seed.

    Raises:
        DataError: no row would be left to train on.
    """
    if eval_rows >= len(dataset):
        raise DataError(
            f"eval_rows={eval_rows} leaves no row to train on: the data has {len(dataset)} rows\n"
            f"next: set eval_rows below {len(dataset)}"
        )
    parts = dataset.train_test_split(test_size=eval_rows, seed=seed)
    return parts["train"], parts["test"]


def ensure_chat_template(tokenizer: PreTrainedTokenizerBase, dataset: Dataset) -> None:
    """Check that the tokenizer can frame these rows: by its chat template, or by an EOS token.

    One row of every order of roles is rendered: templates refuse orders (two user turns in a
    row, a system turn), and TRL would stop half-way with an error that names no row.

    Args:
        tokenizer: the tokenizer of the model.
        dataset: rows of `load_rows`.

    Raises:
        DataError: no chat template for conversations, a template that refuses a row, or no EOS
            token for plain text.
    """
    from datasets import Value
    from jinja2 import TemplateError

    if isinstance(dataset.features.get("text", dataset.features.get("completion")), Value):
        if tokenizer.eos_token is None:
            raise DataError(
                "the tokenizer has no EOS token, which ends every row of plain text\n"
                "next: set eos_token in the model's tokenizer_config.json"
            )
        return
    if tokenizer.chat_template is None:
        raise DataError(
            "the data is conversations and the tokenizer of this model has no chat template\n"
            "next: use the instruct version of the model, or give plain rows: text, or prompt and"
            " completion as strings"
        )
    seen = set()
    for row in dataset:
        turns = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
        order = tuple(turn["role"] for turn in turns)
        if order in seen:
            continue
        seen.add(order)
        try:
            tokenizer.apply_chat_template(turns, tokenize=False)
        except TemplateError as error:
            raise DataError(
                f"{row['where']}: the model's chat template refuses the order"
                f" {', '.join(order)}: {error}\nnext: mend the row, or use another model"
            ) from error


def check_trainable(
    prepared: Dataset,
    dataset: Dataset,
    summary: DataSummary,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
) -> DataSummary:
    """Count what TRL will learn from, and refuse rows from which nothing would be learned.

    TRL drops a row whose prompt fills `max_seq_length` without a word, and a row of one token
    has no next token to predict. Both are faults here, because the user believes that the row
    is trained on.

    Args:
        prepared: `SFTTrainer.train_dataset` (or its eval dataset): `input_ids` and `labels` of
            every row that TRL kept, and `where`. Not packed.
        dataset: what `prepared` was made from.
        summary: of `load_rows`, for the same source.
        tokenizer: the tokenizer that TRL used.
        max_seq_length: in tokens, as TRL used it.

    Returns:
        `summary` with `rows`, `tokens` and `trainable_tokens` of `prepared`.

    Raises:
        DataError: rows without a trainable token, or with two BOS tokens (counted, with an
            example).
    """
    import numpy as np

    bos = tokenizer.bos_token_id
    kept: set[str] = set()
    doubled: list[str] = []
    tokens = trainable = full = 0
    for row in prepared.select_columns(["where", "input_ids", "labels"]).with_format("numpy"):
        ids, learned = row["input_ids"], int(np.count_nonzero(row["labels"][1:] != -100))
        if learned:
            kept.add(str(row["where"]))
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            doubled.append(str(row["where"]))
        tokens += len(ids)
        trainable += learned
        full += len(ids) >= max_seq_length
    lost = [index for index, where in enumerate(dataset["where"]) if where not in kept]
    if lost:
        example = dataset[lost[0]]
        raise DataError(
            f"{summary.source}: {len(lost)} of {len(dataset)} rows have no token to learn from"
            f" within max_seq_length={max_seq_length}\n"
            f"  such as {example['where']}: {_start(example)}\n"
            "next: raise max_seq_length, or shorten or remove these rows"
        )
    if doubled:
        raise DataError(
            f"{summary.source}: {len(doubled)} of {len(dataset)} rows start with"
            f" {tokenizer.bos_token} twice, such as {doubled[0]}\n"
            f"next: remove {tokenizer.bos_token} from the rows: the tokenizer adds it"
        )
    notes = summary.notes
    if full:
        notes += (f"{full} of {len(prepared)} rows reach max_seq_length: what is longer is cut",)
    return dataclasses.replace(
        summary, rows=len(prepared), tokens=tokens, trainable_tokens=trainable, notes=notes
    )


def _hub_places(source: str, split: str, reader: RowReader) -> Iterator[Place]:
    dataset = _load_hub(source, split)
    reader.settle(dataset.column_names, source)
    wanted = [name for name in dataset.column_names if name in reader.columns]
    for index, row in enumerate(dataset.select_columns(wanted)):
        yield f"{source} row index {index}", row


def _load_hub(source: str, split: str) -> Dataset:
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    name, _, config = source.partition(":")
    advice = f"{near_names(Path(source))}\nnext: check the name, or name a local file"
    before = datasets.config.HF_HUB_OFFLINE
    offline = before
    try:
        # load_dataset would try for 23 seconds before it says that there is no network.
        HfApi().dataset_info(name, timeout=10)
    except RepositoryNotFoundError as error:
        raise DataError(
            f"{name} is no file here and no dataset on the hub that you may read{advice}"
        ) from error
    except HFValidationError as error:
        raise DataError(f"{source!r} is no file here and no hub dataset id{advice}") from error
    except HfHubHTTPError:
        pass  # the hub answered: load_dataset says more
    except Exception:
        # No connection; the hub's releases differ in the HTTP client, and so in its errors.
        offline = True
    datasets.config.HF_HUB_OFFLINE = offline
    try:
        found: Dataset = datasets.load_dataset(name, config or None, split=split)
        return found
    except ConnectionError as error:
        raise DataError(
            f"{name} is no file here, the hub cannot be reached and no copy is in the cache"
            f"{advice}; a hub dataset needs a network the first time"
        ) from error
    # Whatever stops load_dataset lies outside: a gate, a configuration or split that is not
    # there, a script, files of the repository that do not parse. Its own words name which.
    except Exception as error:
        raise DataError(
            f"{source} (split {split}) cannot be loaded from the hub: {error}\n"
            "next: set data_split to a split of the dataset; write ID:CONFIG to pick a"
            " configuration"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _to_dataset(examples: Iterator[dict[str, Any]]) -> Dataset | None:
    """The examples in a memory-mapped Arrow file of their own; None if there are none."""
    import pyarrow
    from datasets import Dataset

    first = next(examples, None)
    if first is None:
        return None
    turns = pyarrow.list_(
        pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    )
    schema = pyarrow.schema(
        [
            (key, pyarrow.string() if isinstance(value, str) else turns)
            for key, value in first.items()
        ]
    )
    folder = tempfile.mkdtemp(prefix="poros-data-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = str(Path(folder) / "rows.arrow")
    examples = itertools.chain([first], examples)
    try:
        with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
            while batch := list(itertools.islice(examples, _ROWS_PER_WRITE)):
                writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))
    except OSError as error:
        raise DataError(
            f"the rows cannot be written to {folder}: {error}\n"
            "next: make room there, or set TMPDIR to a folder with room"
        ) from error
    return Dataset.from_file(path)


def _start(example: Mapping[str, Any]) -> str:
    """How a row starts, for a message."""
    value = next(example[key] for key in ("text", "prompt", "messages") if key in example)
    text = value if isinstance(value, str) else value[0]["content"]
    return repr(text if len(text) <= 60 else text[:60] + "...")
