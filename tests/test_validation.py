import json
import subprocess

import pytest

from poros import validation

CASE = {"model": "qwen2.5-7b", "tokens": "1x512", "block_size": 2, "program": "streamed"}
MACHINE = {
    "gpu": "GPU",
    "driver": "580.1",
    "cpu_cores": 2,
    "ram_gib": 4.0,
    "link_gb_per_s": 50.0,
    "vram_cap_gib": None,
}


def test_an_artifact_has_the_documented_form_and_reads_back(tmp_path, monkeypatch):
    monkeypatch.setenv("POROS_COMMIT", "abc123")
    monkeypatch.setattr("sys.argv", ["/home/someone/run.py", "--out", "/home/someone/x.json"])
    rows = [validation.row(CASE, "step_ms", 316.25), validation.row(CASE, "num_tensors", 3)]
    found = validation.artifact("bench", MACHINE, rows)
    assert list(found) == ["name", "date", "commit", "command", "machine", "versions", "rows"]
    assert found["commit"] == "abc123"
    assert found["command"] == "run.py --out x.json"
    assert found["versions"]["python"] and found["versions"]["torch"]
    assert found["rows"][0] == {"case": CASE, "metric": "step_ms", "value": 316.25, "unit": "ms"}

    path = tmp_path / "new" / "bench.json"
    validation.write(path, found)
    assert validation.read(path) == found
    assert [file.name for file in path.parent.iterdir()] == ["bench.json"]


def test_this_machine_has_the_keys_of_the_format():
    found = validation.machine(12.345)
    assert list(found) == list(MACHINE)
    assert found["link_gb_per_s"] == 12.35 or found["link_gb_per_s"] == 12.34
    assert found["cpu_cores"] >= 1 and found["ram_gib"] > 0
    validation.artifact("x", found, [])
    with pytest.raises(ValueError, match="machine has"):
        validation.artifact("x", {"gpu": None}, [])


@pytest.mark.parametrize(
    ("case", "metric", "value", "named"),
    [
        ({}, "step_seconds", 1.0, "step_seconds"),
        ({}, "step_ms", float("nan"), "finite"),
        ({}, "step_ms", float("inf"), "finite"),
        ({}, "step_ms", True, "finite"),
        ({}, "step_ms", "3", "finite"),
        ({"modell": "qwen2.5-7b"}, "step_ms", 1.0, "modell"),
        ({"model": "Qwen/Qwen2.5-7B"}, "step_ms", 1.0, "qwen2.5-7b"),
        ({"tokens": "512"}, "step_ms", 1.0, "<batch>x<sequence>"),
        ({"tokens": "0x512"}, "step_ms", 1.0, "<batch>x<sequence>"),
        ({"block_size": "2"}, "step_ms", 1.0, "block_size"),
        ({"block_size": True}, "step_ms", 1.0, "block_size"),
        ({"compute": "exactly"}, "step_ms", 1.0, "exact, fast"),
        ({"lora": "all"}, "step_ms", 1.0, "all-linear, qv"),
    ],
)
def test_names_that_are_not_canonical_are_refused(case, metric, value, named):
    with pytest.raises(ValueError, match=named):
        validation.row(case, metric, value)


def test_a_failed_write_leaves_the_artifact_as_it_was(tmp_path):
    path = tmp_path / "x.json"
    good = validation.artifact("x", MACHINE, [validation.row(CASE, "step_ms", 1.0)])
    validation.write(path, good)
    with pytest.raises(ValueError, match="JSON compliant"):
        validation.write(path, {**good, "rows": [float("nan")]})
    assert validation.read(path) == good


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("commit"),
        lambda c: c["rows"][0].update(unit="s"),
        lambda c: c["rows"][0].update(metric="stepms"),
        lambda c: c["rows"][0].update(note="fast"),
        lambda c: c["rows"][0].update(value="1"),
    ],
)
def test_the_reader_refuses_what_the_writer_would_not_write(tmp_path, change):
    content = validation.artifact("x", MACHINE, [validation.row(CASE, "step_ms", 1.0)])
    change(content)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError):
        validation.read(path)


def test_the_table_joins_the_metrics_of_a_case():
    other = {**CASE, "program": "peft"}
    del other["block_size"]
    rows = [
        validation.row(CASE, "step_ms", 316.25),
        validation.row(CASE, "peak_allocated_gib", 4.0),
        validation.row(other, "step_ms", 1400.4),
        validation.row(other, "num_tensors", 3),
    ]
    assert validation.table(
        rows, ["program", "block_size"], ["step_ms", "peak_allocated_gib"]
    ).splitlines() == [
        "| program  | block_size | step_ms | peak_allocated_gib |",
        "| -------- | ---------- | ------: | -----------------: |",
        "| streamed | 2          |   316.2 |                  4 |",
        "| peft     |            |    1400 |                    |",
    ]
    with pytest.raises(ValueError, match="two values of step_ms"):
        validation.table(rows, ["tokens"], ["step_ms"])
    with pytest.raises(ValueError, match="no row"):
        validation.table(rows, ["tokens"], ["floor_share"])


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/a/b/poros", "bench", "--slots", "2"], "poros bench --slots 2"),
        (["/a/poros/__main__.py", "bench"], "poros bench"),
        (["x.py", "--out=/a/b/c.json"], "x.py --out=c.json"),
        (["x.py", "~/c.json", "../../team/c.json"], "x.py c.json c.json"),
        (["x.py", "docs/c.json", "1x512"], "x.py docs/c.json 1x512"),
        (["x.py", "two words"], "x.py 'two words'"),
    ],
)
def test_the_command_names_no_folder_of_this_machine(argv, shown):
    assert validation.command_line(argv) == shown


def test_the_commit_is_gits_only_where_the_package_is_the_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("POROS_COMMIT", raising=False)

    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "poros" / "validation.py"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(validation, "__file__", str(file))
    assert validation._commit() == "unknown"
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    head = git("rev-parse", "HEAD")
    assert validation._commit() == head
    file.write_text("changed")
    assert validation._commit() == f"{head}-dirty"
    inside = tmp_path / "venv" / "site-packages" / "poros" / "validation.py"
    inside.parent.mkdir(parents=True)
    monkeypatch.setattr(validation, "__file__", str(inside))
    assert validation._commit() == "unknown"
