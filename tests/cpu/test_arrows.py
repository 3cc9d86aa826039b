"""The import arrows between the rooms: read from the source, lazy imports included."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "sgl_prefix_attn"

# Room -> the rooms that it may import, in the order of the floors: a room only imports rooms above
# it in this table.
ROOMS = {
    "records": set(),
    "ranges": set(),
    "settings": {"records"},
    "jit": set(),
    "kernels": set(),
    "paths": {"records"},
    "plan": {"jit", "kernels", "records"},
    "predict": {"jit", "kernels", "plan", "records"},
    "metrics": {"records"},
    "execute": {"kernels", "plan", "records"},
    "step": {"metrics", "paths", "plan", "records", "settings"},
    "api": {"execute", "paths", "plan", "predict", "records"},
    "engine": {
        "execute",
        "metrics",
        "paths",
        "plan",
        "predict",
        "ranges",
        "records",
        "settings",
        "step",
    },
    "patches": {"engine"},
    "plugin": {"engine", "patches", "ranges", "settings"},
    "tools": {
        "api",
        "execute",
        "jit",
        "plan",
        "plugin",
        "predict",
        "ranges",
        "records",
        "settings",
        "step",
    },
}
SGLANG_IMPORTERS = {"engine", "metrics", "patches", "plugin"}
LAUNCHERS = {
    f"{PACKAGE}.execute.backends.{name}"
    for name in (
        "hopper_backend", "latent_backend", "portable_backend", "kernel_backend", "new_kv"
    )
}  # fmt: skip


def module_names(path: Path, module: str) -> set[str]:
    """Absolute names of all that `module` imports; `from a import b` gives a and a.b."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(parents) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def source_files() -> dict[str, Path]:
    """Module -> its file, over the package and the folders that it links to."""
    folders = [ROOT / PACKAGE, *(ROOT / PACKAGE / link for link in ("kernels", "patches"))]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in folders
        for path in folder.rglob("*.py")
    }


FILES = source_files()
IMPORTS = {module: module_names(path, module) for module, path in FILES.items()}


def room(module: str) -> str:
    """The room a module belongs to: plan, kernels, records, ...; "" for the package itself."""
    return module.removeprefix(PACKAGE).lstrip(".").split(".")[0]


def rooms_imported_by(name: str) -> set[str]:
    found = set()
    for module, names in IMPORTS.items():
        if room(module) == name:
            found |= {room(n) for n in names if n.startswith(PACKAGE + ".")}
    return (found - {name}) & set(ROOMS)


def importers(target: str) -> set[str]:
    """Modules that import `target` or something in it."""
    return {
        module
        for module, names in IMPORTS.items()
        if any(name == target or name.startswith(target + ".") for name in names)
    }


def test_every_room_of_the_source_is_in_the_table():
    assert {room(module) for module in IMPORTS} - {"", "__main__"} == set(ROOMS)


def test_relative_imports_are_resolved(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("from . import b\nfrom ..c import d\nimport e.f\n")
    assert module_names(path, "p.q.a") == {"p.q", "p.q.b", "p.c", "p.c.d", "e.f"}


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_what_the_table_says(name):
    assert rooms_imported_by(name) == ROOMS[name]


def test_arrows_point_one_way():
    above: set[str] = set()
    for name, imported in ROOMS.items():
        assert imported <= above, name
        above.add(name)


def test_only_the_engine_side_imports_sglang():
    assert set(map(room, importers("sglang"))) <= SGLANG_IMPORTERS


def test_backends_launch_the_kernels_and_the_others_read_their_words():
    words = f"{PACKAGE}.kernels.words"
    for module in importers(f"{PACKAGE}.kernels"):
        used = {n for n in IMPORTS[module] if n.startswith(f"{PACKAGE}.kernels.")}
        if room(module) != "kernels" and module not in LAUNCHERS:
            assert all(n == words or n.startswith(words + ".") for n in used), module


def test_kernels_stand_alone():
    for module, names in IMPORTS.items():
        if room(module) == "kernels":
            outside = {n for n in names if n.split(".")[0] in ("sglang", PACKAGE)}
            assert all(n.startswith(f"{PACKAGE}.kernels") for n in outside), (module, outside)


def test_no_file_is_named_like_another():
    stems = Counter(path.stem for path in FILES.values() if not path.stem.startswith("__"))
    assert [stem for stem, count in stems.items() if count > 1] == []
