"""Rows in, columns of TRL out; every fault with its file and line."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poros.data import (
    check_file,
    check_trainable,
    ensure_chat_template,
    load_rows,
    split_eval,
)
from poros.errors import DataError
from poros.rows import FORMATS

Q = {"role": "user", "content": "How tall is the mast?"}
A = {"role": "assistant", "content": "Twelve metres."}
S = {"role": "system", "content": "You know this boat."}


def write(folder: Path, content, name: str = "rows.jsonl") -> str:
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_bytes(content.encode())
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(path)


def rows_of(dataset) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "where"} for row in dataset]


def oasst(name, parent, role, text, **more):
    return {"message_id": name, "parent_id": parent, "role": role, "text": text, **more}


CONVERTED = {
    "text": ([{"text": "One line."}], "text", [{"text": "One line."}]),
    "prompt-completion": (
        [{"prompt": "2 + 2 =", "completion": " 4"}],
        "prompt-completion",
        [{"prompt": "2 + 2 =", "completion": " 4"}],
    ),
    "prompt-completion of messages": (
        [{"prompt": [S, Q], "completion": [A]}],
        "prompt-completion",
        [{"prompt": [S, Q], "completion": [A]}],
    ),
    "messages": ([{"messages": [S, Q, A, Q, A]}], "messages", [{"messages": [S, Q, A, Q, A]}]),
    "messages without an answer at the end": (
        [{"messages": [Q, A, Q]}],
        "messages",
        [{"messages": [Q, A]}],
    ),
    "content in parts": (
        [{"messages": [{**Q, "content": [{"type": "text", "text": "Hi"}]}, A]}],
        "messages",
        [{"messages": [{**Q, "content": "Hi"}, A]}],
    ),
    "empty system turn": (
        [{"messages": [{**S, "content": ""}, Q, A]}],
        "messages",
        [{"messages": [{**S, "content": ""}, Q, A]}],
    ),
    "alpaca": (
        [
            {"instruction": "Name the knot.", "input": "It makes a loop.", "output": "A bowline."},
            {"instruction": "Name the sail.", "input": "", "output": "A jib."},
            {"instruction": "Name the rope.", "output": "A sheet."},
            {"instruction": "Name the wind.", "input": None, "output": "A trade."},
        ],
        "alpaca",
        [
            {
                "prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": answer}],
            }
            for question, answer in [
                ("Name the knot.\n\nIt makes a loop.", "A bowline."),
                ("Name the sail.", "A jib."),
                ("Name the rope.", "A sheet."),
                ("Name the wind.", "A trade."),
            ]
        ],
    ),
    "sharegpt": (
        [
            {
                "conversations": [
                    {"from": "system", "value": S["content"]},
                    {"from": "human", "value": Q["content"]},
                    {"from": "gpt", "value": A["content"]},
                ]
            }
        ],
        "sharegpt",
        [{"messages": [S, Q, A]}],
    ),
    "sharegpt with role and content": (
        [{"conversations": [Q, A]}],
        "sharegpt",
        [{"messages": [Q, A]}],
    ),
    "alpaca beside its rendered text": (
        [{"instruction": "Go", "output": "Gone", "text": "### Go: Gone"}],
        "alpaca",
        [
            {
                "prompt": [{"role": "user", "content": "Go"}],
                "completion": [{"role": "assistant", "content": "Gone"}],
            }
        ],
    ),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_format_is_found_and_converted(tmp_path, name):
    given_rows, data_format, wanted = CONVERTED[name]
    source = write(tmp_path, given_rows)
    dataset, summary = load_rows(source)
    assert rows_of(dataset) == wanted
    assert (summary.data_format, summary.rows) == (data_format, len(wanted))
    assert dataset["where"][0] == "rows.jsonl line 1"
    assert check_file(source) == summary


def test_sources_of_every_file_type_give_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    wanted = [{"text": "Ahoy, you"}, {"text": 'say "port"'}]
    csv_text = '\ufefftext\r\n"Ahoy, you"\r\n"say ""port"""\r\n'
    sources = [
        write(tmp_path, json.dumps(wanted, indent=1), "a.json"),
        write(tmp_path, json.dumps(wanted), "b.jsonl"),
        write(tmp_path, "".join(json.dumps(row) + "\n" for row in wanted), "c.json"),
        write(tmp_path, csv_text, "d.csv"),
        write(tmp_path, '\ufeffAhoy, you\r\n\r\n  \nsay "port"', "e.txt"),
        str(tmp_path / "f.parquet"),
        str(tmp_path / "folder"),
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(wanted), tmp_path / "f.parquet")
    (tmp_path / "folder").mkdir()
    for index, row in enumerate(wanted):
        write(tmp_path / "folder", [row], f"part{index}.jsonl")
    for source in sources:
        dataset, summary = load_rows(source)
        assert rows_of(dataset) == wanted, source
        assert check_file(source) == summary


def test_bom_crlf_and_blank_lines_keep_line_numbers(tmp_path):
    content = '\ufeff\r\n{"text": "a"}\r\n\r\n   \n{"text": "b\u2028c \u0627\u0644 \U0001f6a2"}\r\n'
    dataset, _ = load_rows(write(tmp_path, content))
    assert list(dataset) == [
        {"where": "rows.jsonl line 2", "text": "a"},
        {"where": "rows.jsonl line 5", "text": "b\u2028c \u0627\u0644 \U0001f6a2"},
    ]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text().filter(str.strip), min_size=1, max_size=5),
    ascii_only=st.booleans(),
    crlf=st.booleans(),
)
def test_jsonl_round_trip_of_any_unicode(tmp_path_factory, texts, ascii_only, crlf):
    end = "\r\n" if crlf else "\n"
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts]
    source = write(tmp_path_factory.mktemp("rows"), end.join(lines))
    dataset, _ = load_rows(source)
    assert dataset["text"][:] == texts


def turn(**changes):
    return {"messages": [Q, {**A, **changes}]}


BAD_ROWS = {
    "not JSON": ('{"text": "a"', "line 2: not JSON: Expecting ',' delimiter at column 13"),
    "no object": ('"a"', "line 2: the row is a string, wanted an object"),
    "null row": ("null", "line 2: the row is null, wanted an object"),
    "not UTF-8": (b'{"text": "\xe9"}', "line 2: not UTF-8: byte 0xe9 at position 11"),
    "missing key": ({"body": "a"}, "line 2: no key text (found: body)"),
    "null": ({"text": None}, "line 2: text is null, wanted a string"),
    "number": ({"text": 3}, "line 2: text is a number, wanted a string"),
    "empty": ({"text": ""}, "line 2: text is empty"),
    "blank": ({"text": " \t"}, "line 2: text is empty"),
    "surrogate": ('{"text": "a\\ud83d"}', "line 2: text has half of a character (\\ud83d)"),
    "huge number": ('{"text": ' + "1" * 5000 + "}", "line 2: not JSON: Exceeds the limit"),
    "too deep": ("[" * 100_000, "line 2: not JSON: "),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_text_row_is_named(tmp_path, name):
    row, reason = BAD_ROWS[name]
    if isinstance(row, dict):
        row = json.dumps(row)
    content = b'{"text": "fine"}\n' + (row if isinstance(row, bytes) else row.encode()) + b"\n"
    source = write(tmp_path, content)
    for read in (load_rows, check_file):
        with pytest.raises(DataError) as caught:
            read(source)
        assert f"{source}: 1 bad row\n  rows.jsonl {reason}" in str(caught.value)


BAD_CONVERSATIONS = {
    "unknown role": (turn(role="robot"), "messages[1].role is 'robot', wanted one of system, user"),
    "null role": (turn(role=None), "messages[1].role is null, wanted a string"),
    "null content": (turn(content=None), "messages[1].content is null, wanted a string"),
    "empty content": (turn(content=""), "messages[1].content is empty"),
    "no content": (
        {"messages": [{"role": "user"}]},
        "no key messages[0].content (found: role)",
    ),
    "turn is no object": ({"messages": ["hi"]}, "messages[0] is a string, wanted an object"),
    "image": (
        turn(content=[{"type": "image"}]),
        "messages[1].content has a part that is image, wanted text only",
    ),
    "tool calls": (turn(tool_calls=[{}]), "messages[1] has tool_calls"),
    "no turns": ({"messages": []}, "messages is empty"),
    "null": ({"messages": None}, "messages is null, wanted an array of turns"),
    "no answer": ({"messages": [S, Q]}, "no assistant turn: there is nothing to learn"),
    "missing": ({"chat": []}, "no key messages (found: chat)"),
    "sharegpt role": (
        {"conversations": [{"from": "alien", "value": "x"}]},
        "conversations[0].from is 'alien', wanted one of",
    ),
    "sharegpt value": (
        {"conversations": [{"from": "human", "value": None}]},
        "conversations[0].value is null, wanted a string",
    ),
    "prompt ends in an answer": (
        {"prompt": [Q, A], "completion": [A]},
        "prompt ends in an assistant turn",
    ),
    "completion ends in a question": (
        {"prompt": [Q], "completion": [A, Q]},
        "completion ends in a user turn, wanted assistant",
    ),
    "half strings, half messages": (
        {"prompt": "a", "completion": [A]},
        "completion is an array, wanted a string",
    ),
    "alpaca output": ({"instruction": "a", "output": ""}, "output is empty"),
    "alpaca input": (
        {"instruction": "a", "input": 5, "output": "b"},
        "input is a number, wanted a string",
    ),
    "oasst role": (oasst("m", None, "bot", "x"), "role is 'bot', wanted one of prompter, user"),
    "oasst first turn": (
        oasst("m", None, "assistant", "x"),
        "is turn 1 of its thread, wanted role prompter",
    ),
}


@pytest.mark.parametrize("name", BAD_CONVERSATIONS)
def test_bad_conversation_is_named(tmp_path, name):
    row, reason = BAD_CONVERSATIONS[name]
    formats = {
        "messages": "messages",
        "chat": "messages",
        "conversations": "sharegpt",
        "prompt": "prompt-completion",
        "instruction": "alpaca",
        "message_id": "oasst",
    }
    with pytest.raises(DataError) as caught:
        check_file(write(tmp_path, [row]), formats[next(iter(row))])
    assert f"rows.jsonl line 1: {reason}" in str(caught.value)


def test_all_bad_rows_are_counted_and_the_first_five_named(tmp_path):
    source = write(tmp_path, [{"text": "fine"}] + [{"text": None}] * 7)
    with pytest.raises(DataError) as caught:
        load_rows(source)
    text = str(caught.value)
    assert "7 bad rows" in text and "and 2 more" in text
    assert "line 6:" in text and "line 7:" not in text


def test_strings_and_messages_do_not_mix(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": [Q], "completion": [A]}]
    with pytest.raises(DataError, match=r"rows\.jsonl line 2: strings and message lists"):
        load_rows(write(tmp_path, rows))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", "", "has no row to train on"),
        ("a.jsonl", "\n \r\n", "has no row to train on"),
        ("a.json", "[]", "has no row to train on"),
        ("a.csv", "", "has no row to train on"),
        ("a.csv", "text\n", "has no row to train on"),
        ("a.txt", "\n\n", "has no row to train on"),
        ("a.json", '[{"text": "a"},\n{"text" "b"}]', "line 2: not JSON: Expecting ':'"),
        ("a.json", '["a"]', "a.json row index 0: the row is a string"),
        ("a.json", '[{"text": "a"}, {"text": null}]', "a.json row index 1: text is null"),
        ("a.json", '{\n "rows": []\n}', "is one JSON object over several lines"),
        ("a.jsonl", "{'text': 'a'}", "a.jsonl line 1: not JSON: Expecting property name"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "is UTF-16\nnext: save it as UTF-8"),
        ("a.csv", "text,id\na,1\n\nb\n", "a.csv line 4: 1 cells, the header has 2"),
        ("a.csv", 'text\n"a\nb"\n""\n', "a.csv line 4: text is empty"),
        ("a.csv", 'text\n"a', "a.csv line 2: not CSV: unexpected end of data"),
        ("a.csv", b"text\n\xe9\n", "not UTF-8"),
        ("a.csv", "text,text\na,b\n", "line 1: two columns have the same name"),
        ("a.parquet", "text", "not parquet"),
        ("a.xlsx", "text", "the file type .xlsx is not read\nnext: convert it to one of .jsonl"),
        ("a.jsonl", '{"body": "a"}', "the columns body fit no known format"),
        ("a.jsonl", "{}", "the columns (none) fit no known format"),
        (
            "a.jsonl",
            '{"messages": [], "conversations": []}',
            "fit several formats: messages, sharegpt",
        ),
    ],
)
def test_bad_file_is_one_clear_error(tmp_path, name, content, reason):
    source = write(tmp_path, content, name)
    for read in (load_rows, check_file):
        with pytest.raises(DataError) as caught:
            read(source)
        assert reason in str(caught.value)
        assert name in str(caught.value)


def test_unknown_columns_list_the_known_formats(tmp_path):
    with pytest.raises(DataError) as caught:
        check_file(write(tmp_path, [{"question": "a", "answer": "b"}]))
    for name in FORMATS:
        assert f"\n  {name}: " in str(caught.value)


def test_missing_file_names_what_is_near(tmp_path):
    write(tmp_path, [{"text": "a"}], "training.jsonl")
    with pytest.raises(DataError, match=r"no such file: .*\nnear it: training\.jsonl"):
        load_rows(str(tmp_path / "trainin.jsonl"))
    with pytest.raises(DataError, match=r"no such file: rows\.jsnl"):
        check_file("rows.jsnl")
    with pytest.raises(DataError, match="nor a folder"):
        check_file(str(tmp_path / "nowhere" / "rows.jsonl"))


def test_folder_of_several_types_or_of_none_is_refused(tmp_path):
    with pytest.raises(DataError, match="found none"):
        check_file(str(tmp_path))
    write(tmp_path, "a", "a.txt")
    write(tmp_path, "text\na", "a.csv")
    with pytest.raises(DataError, match=r"found \.csv and \.txt"):
        check_file(str(tmp_path))


def test_hub_dataset_without_a_network_is_one_quick_error(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="the hub cannot be reached and no copy is in the cache"):
        load_rows("poros-tests/no-such-dataset")
    with pytest.raises(DataError, match="no hub dataset id"):
        load_rows("not a name")
    assert check_file("poros-tests/no-such-dataset").rows is None


def test_hub_rows_are_converted_like_file_rows(monkeypatch):
    import datasets
    from huggingface_hub import HfApi

    rows = [{"instruction": "a", "input": None, "output": "b", "id": 1}]
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        if split == "test":
            raise ValueError('Unknown split "test". Should be one of [train].')
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(HfApi, "dataset_info", lambda *args, **kwargs: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset, summary = load_rows("someone/faq:main")
    assert asked == [("someone/faq", "main", "train")]
    assert dataset["where"][0] == "someone/faq:main row index 0"
    assert dataset["completion"][0] == [{"role": "assistant", "content": "b"}]
    assert summary.notes == ("ignored columns: id",)
    with pytest.raises(DataError, match=r"Should be one of \[train\]"):
        load_rows("someone/faq", split="test")


def test_oasst_takes_the_best_reply_at_every_turn(tmp_path):
    rows = [
        oasst("r1", None, "prompter", "Q1"),
        oasst("a2", "r1", "assistant", "worse", rank=1),
        oasst("a1", "r1", "assistant", "better", rank=0, lang="en"),
        oasst("p1", "a1", "prompter", "and then?"),
        oasst("p2", "a1", "prompter", "never asked"),
        oasst("b0", "p1", "assistant", "gone", rank=0, deleted=True),
        oasst("b1", "p1", "assistant", "unranked"),
        oasst("b2", "p1", "assistant", "ranked", rank=3),
        oasst("p3", "b2", "prompter", "unanswered"),
        oasst("r2", None, "prompter", "no reply"),
        oasst("x1", "lost", "assistant", "orphan"),
    ]
    dataset, summary = load_rows(write(tmp_path, rows))
    wanted = [("user", "Q1"), ("assistant", "better"), ("user", "and then?")]
    wanted.append(("assistant", "ranked"))
    assert [[(t["role"], t["content"]) for t in row["messages"]] for row in dataset] == [wanted]
    assert dataset["where"][0] == "rows.jsonl line 8"
    assert (summary.data_format, summary.rows) == ("oasst", 1)
    notes = "\n".join(summary.notes)
    assert "10 messages became 1 threads" in notes
    assert "1 messages are marked deleted" in notes
    assert "1 messages hang on a parent that is not in the data" in notes


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([oasst("a", "b", "assistant", "x"), oasst("b", "a", "prompter", "y")], "has no row"),
        (
            [oasst("a", None, "prompter", "x"), oasst("a", None, "prompter", "y")],
            "line 2: message_id a is taken by rows.jsonl line 1",
        ),
        (
            [oasst("a", None, "prompter", "x"), oasst("b", "a", "prompter", "y")],
            "line 2: is turn 2 of its thread, wanted role assistant",
        ),
    ],
)
def test_broken_oasst_trees_are_refused(tmp_path, rows, reason):
    with pytest.raises(DataError) as caught:
        load_rows(write(tmp_path, rows))
    assert reason in str(caught.value)


def test_a_changed_file_is_read_anew(tmp_path):
    for text in ("old", "new"):  # same length, same name
        dataset, _ = load_rows(write(tmp_path, [{"text": text}]))
        assert dataset["text"][0] == text


def test_check_needs_no_ml_package(tmp_path):
    source = write(tmp_path, CONVERTED["alpaca"][0])
    (tmp_path / "a.parquet").write_bytes(b"")
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'datasets', 'trl', 'pyarrow', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "from poros.data import check_file\n"
        f"print(check_file({source!r}).rows)\n"
        f"print(check_file({str(tmp_path / 'a.parquet')!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("4\n"), done.stderr
    assert "pip install pyarrow" in done.stdout


def test_split_eval_is_deterministic_and_disjoint(tmp_path):
    dataset, _ = load_rows(write(tmp_path, [{"text": f"row {i}"} for i in range(20)]))
    train, held_out = split_eval(dataset, 5, seed=1)
    again = split_eval(dataset, 5, seed=1)[1]
    assert held_out["text"][:] == again["text"][:] != split_eval(dataset, 5, seed=2)[1]["text"][:]
    assert sorted(train["text"][:] + held_out["text"][:]) == sorted(dataset["text"][:])
    with pytest.raises(DataError, match="eval_rows=20 leaves no row to train on"):
        split_eval(dataset, 20, seed=1)


# With TRL's own preparation

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer that adds a BOS, and whose padding token is its EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(["How tall is the mast? Twelve metres.", "user assistant"], trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", inner.token_to_id("<|bos|>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHATML,
    )


def prepare(dataset, tokenizer, folder, max_length=64):
    """TRL's trainer over a tiny model: its `train_dataset` is what would be trained on."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    args = SFTConfig(
        output_dir=str(folder / "out"),
        max_length=max_length,
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=2,
    )
    model = LlamaForCausalLM(config)
    return SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)


def learned(tokenizer, row) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def test_alpaca_rows_learn_the_answer_and_its_end(tmp_path, tokenizer):
    rows = [
        {"instruction": "How tall?", "output": "Twelve metres."},
        {"instruction": "How tall is the mast?", "input": "In feet.", "output": "Forty."},
    ]
    dataset, summary = load_rows(write(tmp_path, rows))
    ensure_chat_template(tokenizer, dataset)
    trainer = prepare(dataset, tokenizer, tmp_path)
    by_where = {row["where"]: row for row in trainer.train_dataset}
    first = by_where["rows.jsonl line 1"]
    assert learned(tokenizer, first) == "Twelve metres.<|im_end|>\n"
    assert tokenizer.decode(first["input_ids"]) == (
        "<|im_start|>user\nHow tall?<|im_end|>\n<|im_start|>assistant\nTwelve metres.<|im_end|>\n"
    )
    second = by_where["rows.jsonl line 2"]
    assert learned(tokenizer, second) == "Forty.<|im_end|>\n"
    assert "mast?\n\nIn feet.<|im_end|>" in tokenizer.decode(second["input_ids"])

    counted = check_trainable(trainer.train_dataset, dataset, summary, tokenizer, 64)
    assert counted.rows == 2
    assert counted.tokens == sum(len(row["input_ids"]) for row in by_where.values())
    assert counted.trainable_tokens == sum(
        label != -100 for row in by_where.values() for label in row["labels"]
    )

    # The batch: padding is masked although it is the EOS, and the EOS that was learned stays.
    batch = next(iter(trainer.get_train_dataloader()))
    eos = tokenizer.eos_token_id
    assert (batch["labels"] == eos).sum().item() == 2
    padding = batch["attention_mask"] == 0
    assert padding.any() and (batch["labels"][padding] == -100).all()
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize(
    ("row", "rendered", "target"),
    [
        ({"text": "Ahoy"}, "<|bos|>Ahoy<|im_end|>", "<|bos|>Ahoy<|im_end|>"),
        ({"text": "Ahoy<|im_end|>"}, "<|bos|>Ahoy<|im_end|>", "<|bos|>Ahoy<|im_end|>"),
        ({"prompt": "a b", "completion": " c"}, "<|bos|>a b c<|im_end|>", " c<|im_end|>"),
        (
            {"messages": [Q, A]},
            "<|im_start|>user\nHow tall is the mast?<|im_end|>\n"
            "<|im_start|>assistant\nTwelve metres.<|im_end|>\n",
            "<|im_start|>user\nHow tall is the mast?<|im_end|>\n"
            "<|im_start|>assistant\nTwelve metres.<|im_end|>\n",
        ),
    ],
)
def test_rows_are_framed_once(tmp_path, tokenizer, row, rendered, target):
    dataset, summary = load_rows(write(tmp_path, [row]))
    ensure_chat_template(tokenizer, dataset)
    prepared = prepare(dataset, tokenizer, tmp_path).train_dataset
    assert tokenizer.decode(prepared[0]["input_ids"]) == rendered
    assert learned(tokenizer, prepared[0]) == target
    assert check_trainable(prepared, dataset, summary, tokenizer, 64).rows == 1


def test_rows_that_teach_nothing_are_counted_with_an_example(tmp_path, tokenizer):
    rows = [
        {"instruction": "How tall?", "output": "Twelve metres."},
        {"instruction": "How tall is the mast? " * 30, "output": "Twelve."},
        {"instruction": "How tall is the mast? " * 40, "output": "Twelve."},
    ]
    source = write(tmp_path, rows)
    dataset, summary = load_rows(source)
    prepared = prepare(dataset, tokenizer, tmp_path).train_dataset
    assert len(prepared) == 1  # TRL drops the others and says nothing
    with pytest.raises(DataError) as caught:
        check_trainable(prepared, dataset, summary, tokenizer, 64)
    text = str(caught.value)
    assert f"{source}: 2 of 3 rows have no token to learn from within max_seq_length=64" in text
    assert "such as rows.jsonl line 2: 'How tall is the mast? How tall" in text


def test_a_row_of_one_token_teaches_nothing(tmp_path, tokenizer):
    dataset, summary = load_rows(write(tmp_path, [{"text": "Ahoy"}]))
    prepared = prepare(dataset, tokenizer, tmp_path, max_length=1).train_dataset
    assert len(prepared) == 1
    with pytest.raises(DataError, match="1 of 1 rows have no token to learn from"):
        check_trainable(prepared, dataset, summary, tokenizer, 1)


def test_cut_rows_are_noted_and_a_second_bos_is_refused(tmp_path, tokenizer):
    dataset, summary = load_rows(write(tmp_path, [{"text": "How tall is the mast? " * 30}]))
    prepared = prepare(dataset, tokenizer, tmp_path).train_dataset
    notes = check_trainable(prepared, dataset, summary, tokenizer, 64).notes
    assert notes == ("1 of 1 rows reach max_seq_length: what is longer is cut",)

    dataset, summary = load_rows(write(tmp_path, [{"text": "<|bos|>Ahoy"}]))
    prepared = prepare(dataset, tokenizer, tmp_path).train_dataset
    reason = re.escape("1 of 1 rows start with <|bos|> twice, such as rows.jsonl line 1")
    with pytest.raises(DataError, match=reason):
        check_trainable(prepared, dataset, summary, tokenizer, 64)


def test_conversations_need_a_template_that_takes_them(tmp_path, tokenizer):
    import copy

    dataset, _ = load_rows(write(tmp_path, [{"messages": [Q, A]}, {"messages": [Q, Q, A]}]))
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(DataError, match="has no chat template\nnext: use the instruct version"):
        ensure_chat_template(bare, dataset)
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{% for message in messages %}{% if message.role != ['user', 'assistant'][loop.index0 % 2]"
        " %}{{ raise_exception('Roles must alternate.') }}{% endif %}{% endfor %}" + CHATML
    )
    with pytest.raises(DataError, match=r"line 2: .* user, user, assistant: Roles must alternate"):
        ensure_chat_template(strict, dataset)

    plain, _ = load_rows(write(tmp_path, [{"text": "Ahoy"}]))
    ensure_chat_template(bare, plain)
    bare.eos_token = None
    with pytest.raises(DataError, match="no EOS token"):
        ensure_chat_template(bare, plain)


@pytest.mark.parametrize(
    ("name", "data_format", "columns"),
    [
        ("faq-alpaca.jsonl", "alpaca", {"where", "prompt", "completion"}),
        ("faq-sharegpt.jsonl", "sharegpt", {"where", "messages"}),
    ],
)
def test_published_question_answer_rows(name, data_format, columns):
    """503 rows of PyPI zaragoza-construction-faq (CC-BY-4.0), read where it is installed."""
    spec = importlib.util.find_spec("zaragoza_construction_faq")
    if spec is None:
        pytest.skip("pip install zaragoza-construction-faq")
    source = Path(spec.submodule_search_locations[0]) / "data" / name
    dataset, summary = load_rows(str(source))
    assert (len(dataset), summary.rows, summary.data_format) == (503, 503, data_format)
    assert set(dataset.column_names) == columns
    given_rows = [json.loads(line) for line in source.read_text().splitlines()]
    answers = [
        row["output"] if data_format == "alpaca" else row["conversations"][-1]["value"]
        for row in given_rows
    ]
    last = "completion" if data_format == "alpaca" else "messages"
    assert [row[last][-1]["content"] for row in dataset] == answers
