"""Documentation that cannot rot: its code runs, its figures and pages come from their sources."""

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from poros.config import read_config
from poros.rows import check_file

ROOT = Path(__file__).parent.parent
POROS = Path(sys.executable).with_name("poros")
BLOCK = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(specification)
specification.loader.exec_module(generate)

NAMES = [str(page.relative_to(ROOT)) for page in generate.pages()]
WRITTEN = [name for name in NAMES if name != "docs/cli.md"]  # by hand

TALK = [("Hi", "Hello."), ("What is a slot?", "A buffer on the device."), ("And a block?", "One.")]
SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
# What stands in the pages for what is too large, too slow or not here in a test.
INSTEAD = {
    "OpenAssistant/oasst1": "threads.jsonl",
    "steps=200": "steps=2",
    "steps: 200": "steps: 2",
    "SFTConfig(": "SFTConfig(use_cpu=True, bf16=False, ",
    "poros bench": f"poros bench --shape {shlex.quote(json.dumps(SHAPE))} --tokens 1x8 --steps 1"
    " --device cpu",
}
MODEL = "Qwen/Qwen2.5-32B"  # the tiny model stands for it, except where only its shape is read


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


class Reader:
    """Somebody who does what a page shows, block by block, in one folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.done: Counter[str] = Counter()
        turns = [
            [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            for asked, said in TALK * 2
        ]
        self.write("data.jsonl", [{"messages": talk} for talk in turns])
        threads = []
        for i, (asked, said) in enumerate(TALK):
            one, two = {"message_id": f"q{i}"}, {"message_id": f"a{i}", "parent_id": f"q{i}"}
            one |= {"parent_id": None, "role": "prompter", "text": asked}
            two |= {"role": "assistant", "text": said}
            threads += [one, two]
        self.write("threads.jsonl", threads)

    def write(self, name: str, rows: list[dict[str, object]]) -> None:
        lines = [json.dumps(row) for row in rows]
        (self.folder / name).write_text("\n".join(lines), encoding="utf-8")

    def follow(self, text: str) -> None:
        for language, block in BLOCK.findall(text):
            does = getattr(self, f"_{language}", None)
            assert does is not None, f"a block of unknown language {language!r}:\n{block}"
            does(block)
            self.done[language] += 1

    def _put(self, text: str, model: bool = True) -> str:
        for shown, instead in INSTEAD.items():
            text = text.replace(shown, instead)
        return text.replace(MODEL, str(self.model)) if model else text

    def _bash(self, block: str) -> None:
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            if words[0] == "poros":
                # A plan needs no weights: it is made for the model that the page names.
                line = self._put(line, model=words[1] != "plan")
                self.call(*shlex.split(line, comments=True)[1:])
            elif words[:2] == ["pip", "install"]:
                (wanted,) = words[2:]
                extra = re.fullmatch(r"\.\[(\w+)\]", wanted)[1]
                project = tomllib.loads(page("pyproject.toml"))["project"]
                assert extra in project["optional-dependencies"]
            elif words[0] == "make":
                (target,) = words[1:]
                assert re.search(rf"^{target}:", page("Makefile"), re.MULTILINE), line
            else:
                raise AssertionError(f"nobody knows how to check {line!r}")
            self.done["line"] += 1

    def call(self, *arguments: str) -> str:
        done = subprocess.run(
            [POROS, *arguments],
            cwd=self.folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"poros {arguments}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def _python(self, block: str) -> None:
        exec(compile(self._put(block), "<page>", "exec"), self.names)

    def _yaml(self, block: str) -> None:
        path = self.folder / "run.yaml"
        path.write_text(self._put(block), encoding="utf-8")
        read_config(path)

    def _jsonl(self, block: str) -> None:
        for number, row in enumerate(block.splitlines()):
            file = self.folder / f"row{number}.jsonl"
            file.write_text(row, encoding="utf-8")
            assert check_file(str(file)).rows == 1

    def _text(self, block: str) -> None:
        """What a program prints: `test_the_output_shown` compares it."""


@pytest.fixture
def reader(tmp_path, tiny_qwen2, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Reader(tmp_path, tiny_qwen2)


# -- code ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_does_what_it_shows(name, reader):
    text = page(name)
    outside = BLOCK.sub("", text)
    assert "```" not in outside and not re.search(r"\n\n {4}", outside), "a block without a fence"
    reader.follow(text)
    shown = Counter(language for language, _ in BLOCK.findall(text))
    assert {language: reader.done[language] for language in shown} == shown
    assert reader.done["line"] >= shown["bash"]


def test_the_pages_show_code():
    shown = Counter(language for name in WRITTEN for language, _ in BLOCK.findall(page(name)))
    assert shown["bash"] >= 4 and shown["python"] >= 5


def test_every_substitution_is_still_needed():
    text = "".join(map(page, WRITTEN))
    assert [shown for shown in [*INSTEAD, MODEL] if shown not in text] == []


@pytest.mark.parametrize(
    "block",
    [
        "```\nmake demo\n```",
        "```fortran\nSTOP\n```",
        "```bash\nrm -r here\n```",
        "```bash\nmake coffee\n```",
        "```bash\npip install '.[coffee]'\n```",
        "```bash\nporos init x.yaml -d y\n```",
        "```bash\nporos brew\n```",
        "```python\nassert 1 > 2\n```",
        "```yaml\nmodel: m\ndata: d\nstepz: 3\n```",
        '```jsonl\n{"question": "none of the formats"}\n```',
    ],
)
def test_a_block_that_is_wrong_is_found(block, reader):
    with pytest.raises(Exception):  # noqa: B017 - each breaks in its own way
        reader.follow(f"{block}\n")


def shape(line: str) -> str:
    """A line of output without its numbers, durations and free text."""
    line = re.sub(r"^(before|after): .*", r"\1:", line)
    line = re.sub(r"\d[\d.,]*", "#", line)
    line = re.sub(r"(#(ms|s|m|h))+", "#s", line)
    return re.sub(r"^adapter: .*", "adapter:", line)


def test_the_output_shown_is_what_the_demo_prints(reader):
    (shown,) = [block for language, block in BLOCK.findall(page("README.md")) if language == "text"]
    settings = [f"model={reader.model}", "data=data.jsonl", "data_format=auto", "eval_rows=2"]
    printed = reader.call(
        "train", str(ROOT / "examples" / "quickstart.yaml"), *settings, "steps=2", "device=cpu"
    )
    known = set(map(shape, printed.splitlines()))
    # An answer, which is indented, and a gap are all that may differ.
    lines = [line for line in shown.splitlines() if line != "..." and not line.startswith("  ")]
    assert len(lines) >= 8
    assert [line for line in lines if shape(line) not in known] == []


# -- figures ---------------------------------------------------------------------------------------


@functools.cache
def generated() -> dict[Path, str]:
    return generate.generated()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_as_make_docs_writes_it(name):
    assert page(name) == generated()[ROOT / name], f"{name} is out of date: run `make docs`"


def test_docs_cli_names_every_command():
    from poros.cli import app

    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert len(names) > 4
    assert [name for name in names if f"## `poros {name}`" not in page("docs/cli.md")] == []


def test_every_artifact_is_shown_and_every_figure_is_from_one():
    marked = [found for name in WRITTEN for found in generate.MARKED.findall(page(name))]
    artifacts = [str(p.relative_to(ROOT)) for p in (ROOT / "docs/validation").rglob("*.json")]
    assert artifacts
    assert {found[1] for found in marked} == set(artifacts)
    for name in WRITTEN:
        by_hand = generate.MARKED.sub("", BLOCK.sub("", page(name)))
        assert "<!-- table" not in by_hand, f"{name}: a marker without its end"
        assert re.findall(r"^\|.*\|\s*[\d.]+\s*\|.*$", by_hand, re.MULTILINE) == []


def test_a_table_follows_its_artifact(tmp_path, monkeypatch):
    artifact = json.loads(page("docs/validation/bench/qwen2.5-7b.json"))
    changed = next(row for row in artifact["rows"] if row["metric"] == "step_ms")
    changed["value"] = 123.0
    (tmp_path / "a.json").write_text(json.dumps(artifact))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    case = ", ".join(f"{k}={changed['case'][k]}" for k in ("program", "tokens", "block_size"))
    text = f"<!-- table: a.json; {case}, model; step_ms -->\n1\n<!-- end -->"
    made = generate.with_tables(text, tmp_path / "page.md")
    assert made.splitlines()[2:5] == [
        "| model      | step_ms |",
        "| ---------- | ------: |",
        "| qwen2.5-7b |     123 |",
    ]
    assert generate.with_tables(made, tmp_path / "page.md") == made
    with pytest.raises(ValueError, match=r"page\.md.*no row"):
        generate.with_tables(text.replace("program=", "program=no-"), tmp_path / "page.md")


@pytest.mark.parametrize("name", NAMES)
def test_links_inside_the_repository_lead_somewhere(name):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page(name))
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []
