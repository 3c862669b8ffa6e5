"""The import ladder: a file of the package imports only from levels below its own."""

import ast
from pathlib import Path

import poros

PACKAGE = Path(poros.__file__).parent

LEVELS = {
    0: ["errors", "units"],
    1: ["config", "rows", "shapes", "core/__init__", "core/schedule", "core/layout"],
    2: ["plan", "hardware", "frozen", "core/store"],
    3: ["core/stream", "core/boundary"],
    4: ["core/block"],
    5: ["core/attach", "head", "loader"],
    6: ["trainer", "data", "report", "checkpoint", "validation"],
    7: ["api", "verify", "bench", "cli/quiet"],
    8: ["__init__", "cli/bench", "cli/check", "cli/doctor", "cli/init", "cli/plan", "cli/train"],
    9: ["cli/__init__"],
    10: ["__main__"],
}
LEVEL_OF = {name: level for level, names in LEVELS.items() for name in names}
# Within one level only these may lean on each other, in this direction.
SAME_LEVEL = {("errors", "units")}


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imported(path: Path) -> set[str]:
    """Names, as in LEVELS, of the files of this package that a file imports anywhere in it."""
    files = {module_name(file) for file in PACKAGE.rglob("*.py")}

    def file_of(dotted: str) -> str | None:
        name = "/".join(dotted.split(".")[1:])
        init = f"{name}/__init__" if name else "__init__"
        return name if name in files else init if init in files else None

    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [[alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            # `from poros import api` names a file, `from poros.api import load` what is in one.
            targets = [[f"{node.module}.{alias.name}", node.module] for alias in node.names]
        else:
            continue
        for names in targets:
            if names[-1].split(".")[0] != "poros":
                continue
            file = next(filter(None, map(file_of, names)), None)
            assert file is not None, f"{path}: nothing is called {names[-1]}"
            found.add(file)
    return found


def faults(path: Path) -> list[str]:
    name = module_name(path)
    if name not in LEVEL_OF:
        return [f"{name}: give it a level"]
    return [
        f"{name} (level {LEVEL_OF[name]}) imports {other} (level {LEVEL_OF.get(other)})"
        for other in sorted(imported(path))
        if (name, other) not in SAME_LEVEL and not LEVEL_OF.get(other, 99) < LEVEL_OF[name]
    ]


def test_imports_obey_the_levels():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    assert [fault for file in files for fault in faults(file)] == []


def test_the_walk_sees_imports_wherever_they_stand(tmp_path, monkeypatch):
    for line in (
        "from poros import api",
        "import poros.api",
        "from poros.api import load",
        "def f():\n    from poros.api import load",
        "if True:\n    import poros.api as a",
    ):
        path = tmp_path / "units.py"
        path.write_text(line)
        (tmp_path / "api.py").touch()
        (tmp_path / "__init__.py").touch()
        monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
        assert faults(path) == ["units (level 0) imports api (level 7)"], line
    (tmp_path / "stranger.py").touch()
    assert faults(tmp_path / "stranger.py") == ["stranger: give it a level"]
