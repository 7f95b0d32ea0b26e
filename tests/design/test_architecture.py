"""Checks of the design: who imports whom, what loads when, the sizes of files, and names and options that pipelines
use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from helpers import cli

from posexport.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
HOMES = {
    "posexport": ROOT / "posexport",
    "posexport.models": ROOT / "models",
    "posexport.custom_ops": ROOT / "custom_ops",
}
HEAVY = {"torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "tensorrt", "tensorrt_rtx", "polygraphy"}
HEAVY |= {"transformers", "matplotlib", "numpy", "safetensors", "cryptography"}


@cache
def modules() -> dict[str, Path]:
    """Every module of posexport by its import name."""
    found = {}
    for package, folder in HOMES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


@cache
def imports(path: Path) -> frozenset[str]:
    """The modules that a file imports anywhere, except imports for type checkers only."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.expr) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            return  # an expression cannot contain an import
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules() else str(node.module))
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(ast.parse(path.read_text()))
    return frozenset(found)


def ours(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "posexport"}


ROOMS = (
    r"posexport(\.(errors|files|jsondata|machine|processes|progress|temporary))?",
    r"posexport\.spec",
    r"posexport\.custom_ops",
    r"posexport\.models",
    r"posexport\.artifact",
    r"posexport\.runtimes",
    r"posexport\.graphs",
    r"posexport\.rewrite",
    r"posexport\.export",
    r"posexport\.verify",
    r"posexport\.bench",
    r"posexport\.(report|workflows)",
    r"posexport\.(cli|__main__)",
)
"""The rooms from the ground up. A module may import from its own room and from the rooms listed before it."""


def room(name: str) -> int:
    """The number of the room that contains a module."""
    (number,) = (at for at, pattern in enumerate(ROOMS) if re.match(pattern + (r"$" if at == 0 else r"(\.|$)"), name))
    return number


def test_no_import_runs_up() -> None:
    for name, path in modules().items():
        for imported in ours(imports(path)):
            assert room(imported) <= room(name), f"{name} imports {imported}"
            if room(imported) == room(name) == len(ROOMS) - 2:
                assert name.split(".")[1] == imported.split(".")[1], f"{name} imports {imported}"
            if room(name) == 2:
                assert imported.startswith(("posexport.custom_ops", "posexport.errors")), f"{name} imports {imported}"


def test_no_import_circle() -> None:
    graph = {name: ours(imports(path)) - {name} for name, path in modules().items()}
    graph = {name: {other for other in others if other in graph} for name, others in graph.items()}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_few_files_lie_outside_the_rooms() -> None:
    assert len(list((ROOT / "posexport").glob("*.py"))) <= 9


def test_temporary_files_have_one_maker() -> None:
    """`posexport.temporary` removes them at every kind of end. `processes` only reads where the system's folder is."""
    makers = {name for name, path in modules().items() if "tempfile" in imports(path)}
    assert makers == {"posexport.temporary", "posexport.processes"}


def test_only_the_command_line_knows_the_command_line() -> None:
    for name, path in modules().items():
        if not name.startswith(("posexport.cli", "posexport.__main__")):
            assert not [other for other in imports(path) if other.startswith(("posexport.cli", "click", "rich"))], name


def test_nobody_imports_the_folders_by_their_own_names() -> None:
    for path in (*modules().values(), *sorted((ROOT / "tests").rglob("*.py"))):
        assert not [name for name in imports(path) if name.split(".")[0] in ("models", "custom_ops")], path


def test_the_oracle_stands_apart() -> None:
    for name in ("oracles", "oracle_rotations", "oracle_scores"):
        allowed = {"__future__", "fractions", "math", "typing", "numpy", "oracle_rotations", "oracle_scores"}
        assert imports(ROOT / "tests" / "models" / f"{name}.py") <= allowed, name


def test_engines_load_in_functions_only_where_start_up_counts() -> None:
    """The encodings, the table of runtimes and the commands import no engine at module level."""
    for name, path in modules().items():
        encodings = r"posexport\.models\.(?!(attention|block|positions|weights|pretrained\w*|whole\w*)$).*"
        start = name in ("posexport.runtimes", "posexport.models", "posexport.spec")
        if name.startswith(("posexport.cli", "posexport.models.checkpoints")) or start or re.fullmatch(encodings, name):
            body = ast.parse(path.read_text()).body
            top = {a.name.split(".")[0] for node in body if isinstance(node, ast.Import) for a in node.names}
            top |= {str(node.module).split(".")[0] for node in body if isinstance(node, ast.ImportFrom)}
            assert not top & (HEAVY | {"rich"}), name


SLOW = {"rich", "cattrs", "importlib.metadata", "importlib.resources", "shutil", "posexport.export", "posexport.files"}
"""Modules with which `posexport list` would take more than three times as long as `import click`."""


def loaded(*lines: str) -> set[str]:
    """The modules that command lines load in a new process."""
    code = (
        "import sys\nfrom posexport.cli import main\nfor line in sys.argv[1:]:\n    try:\n        main(line.split())\n"
        "    except SystemExit as done:\n        assert not done.code, done.code\n"
        "print('\\n'.join(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_and_list_load_no_engine() -> None:
    assert not loaded("--help") & (HEAVY | {"rich"})
    assert not loaded("list", "list --json") & (HEAVY | SLOW)
    assert not loaded("list --presets") & HEAVY


def test_help_of_every_command_loads_no_engine() -> None:
    assert not loaded(*(f"{command} --help" for command in COMMANDS)) & (HEAVY | {"rich"})


def test_files_are_short() -> None:
    lines = {
        path: len(path.read_text().splitlines()) for path in (*modules().values(), *(ROOT / "tests").rglob("*.py"))
    }
    assert {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > 400} == {}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        return [path for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_path_of_one_machine_in_the_source() -> None:
    place = re.compile(r"(?<![\w.])/(work|root|home|tmp|Users)/\w")
    for path in tracked():
        if path.suffix in (".py", ".toml", ".md", ".json", ".txt", "") and path != Path(__file__):
            found = place.search(path.read_text(errors="replace"))
            assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_help_names_every_command() -> None:
    result = cli("--help")
    assert result.exit_code == 0
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}", result.stdout, re.MULTILINE), name
    bare = cli()
    assert (bare.exit_code, bare.stdout) == (2, "")
    assert "Commands:" in bare.stderr


FLAGS: dict[str, list[str]] = {
    "list": ["--presets", "--roles", "--json"],
    "inspect": ["--input", "--attention/--no-attention", "--json", "FILE"],
    "export": [
        "--module", "--example", "--model", "--hidden-states", "--require-all",
        "--config", "--preset", "--from", "--layer", "--encoding", "--set",
        "--hidden-size", "--num-heads", "--num-kv-heads", "--head-dim", "--scale",
        "--causal/--no-causal", "--window", "--attention-chunk-size", "--bias/--no-bias",
        "--angles", "--positions", "--prefix-tokens", "--qk-norm-type", "--layer-pattern",
        "--kv-cache", "--padding-mask/--no-padding-mask", "--cross/--no-cross",
        "--qk-norm/--no-qk-norm", "--softcap", "--sinks/--no-sinks",
        "--block", "--norm", "--norm-type", "--norm-eps", "--mlp", "--intermediate-size", "--layers",
        "--vocab-size", "--scale-embedding/--no-scale-embedding", "--dtype",
        "--form", "--target", "--opset", "--batch", "--seq", "--max-seq", "--weights", "--seed", "--output/-o",
        "--sign", "--json",
    ],
    "compile": [
        "FILE", "--output/-o", "--runtime", "--profile", "--compute-capability", "--memory-limit/--workspace",
        "--timing-cache", "--runtime-cache", "--tf32", "--require-fused-attention", "--input", "--sign", "--trust",
        "--json",
    ],
    "verify": [
        "PATHS", "--project", "--allow-outside",
        "--runtime", "--require", "--inputs", "--reach", "--cases", "--strict", "--properties", "--seed",
        "--time-limit", "--junit", "--markdown", "--json", "--weights", "--from", "--layer", "--prefix-tokens",
        "--trust", "--against", "--module", "--input",
    ],
    "generate": [
        "FILE", "--prompt", "--prompt-ids", "--inputs", "--decoder-input-ids", "--max-new-tokens", "--temperature",
        "--top-k", "--top-p", "--seed", "--ignore-eos", "--runtime", "--json",
    ],
    "rewrite": [
        "FILE", "--output/-o", "--form", "--target", "--opset", "--kv-cache", "--angles", "--require-all", "--only",
        "--input", "--seed", "--sign", "--json",
    ],
    "build": ["NAMES", "--project", "--allow-outside", "--check", "--force", "--sign", "--json"],
    "tune": [
        "FILE", "--input", "--config", "--preset", "--from", "--layer", "--encoding", "--set",
        "--for", "--scenario", "--objective", "--form", "--target", "--opset", "--allow",
        "--hidden-size", "--num-heads", "--num-kv-heads", "--head-dim", "--scale",
        "--causal/--no-causal", "--window", "--attention-chunk-size", "--bias/--no-bias",
        "--angles", "--positions", "--prefix-tokens", "--qk-norm-type", "--layer-pattern",
        "--kv-cache", "--padding-mask/--no-padding-mask", "--cross/--no-cross",
        "--qk-norm/--no-qk-norm", "--softcap", "--sinks/--no-sinks",
        "--block", "--norm", "--norm-type", "--norm-eps", "--mlp", "--intermediate-size", "--layers",
        "--vocab-size", "--scale-embedding/--no-scale-embedding", "--dtype",
        "--batch", "--seq", "--max-seq", "--weights", "--seed", "--output/-o",
        "--save", "--cache", "--resume/--no-resume", "--sign", "--json",
    ],
    "positions": ["--grid", "--frames", "--prefix-tokens", "--batch", "--output/-o", "--json"],
    "plot": [
        "ENCODINGS", "--what", "--set", "--hidden-size", "--num-heads", "--head-dim", "--scale", "--causal/--no-causal",
        "--window", "--attention-chunk-size", "--angles", "--prefix-tokens", "--seq", "--seed", "--runtime",
        "--input", "--output/-o", "--json",
    ],
    "package": [
        "FILE", "--triton", "--genai", "--output/-o", "--name", "--version", "--instances", "--max-batch-size",
        "--gpu/--cpu", "--force", "--sign", "--trust", "--json",
    ],
    "report": ["RESULTS", "--output/-o", "--markdown", "--title", "--json"],
    "bench": [
        "FILE", "--project", "--allow-outside",
        "--runtime", "--scenario", "--shape", "--peers", "--rounds", "--seconds", "--warmup",
        "--threads", "--processes", "--seed", "--cuda-graph", "--save", "--baseline", "--against",
        "--max-regression", "--strict", "--require", "--trust", "--input", "--module", "--json",
    ],
    "sweep": [
        "FILE", "--job", "--output/-o", "--ray", "--workers", "--tries", "--time-limit", "--dry-run", "--json",
    ],
}  # fmt: skip
"""The options of every command. They are frozen because pipelines use them. Add new options here; removing one is a
breaking change."""


def flags(command: Any) -> list[str]:
    return [
        "/".join((*parameter.opts, *parameter.secondary_opts))
        if parameter.opts[0].startswith("-")
        else parameter.name.upper()
        for parameter in command.params
    ]


@pytest.mark.parametrize("name", FLAGS)
def test_options_are_frozen(name: str) -> None:
    assert sorted(flags(main.get_command(None, name))) == sorted(FLAGS[name])  # type: ignore[arg-type]


PUBLIC: dict[str, list[str]] = {
    "posexport.errors": ["PosexportError", "RequestError", "RuntimeMissingError", "unknown"],
    "posexport.spec": ["DTYPES", "Encoding", "FORMS", "OPSETS", "Spec"],
    "posexport.models": ["ENCODINGS", "read_encoding", "read_spec"],
    "posexport.models.checkpoints": ["ARCHITECTURES", "Checkpoint", "read_checkpoint"],
    "posexport.models.block": ["Block", "build_block", "inner_name"],
    "posexport.models.weights": ["read_weights", "seeded_weights", "weight_shapes"],
    "posexport.export": ["DOMAIN", "export", "export_module"],
    "posexport.artifact": ["Artifact", "manifest_path", "matches_manifest", "read_manifest", "read_onnx", "write_onnx"],
    "posexport.custom_ops": [
        "alibi_bias", "attend", "attend_cached", "attend_shared", "head_norm", "key_positions", "pair_features",
        "relative_bias", "relative_score", "relative_table_score", "rotate", "sinusoids",
    ],
    "posexport.files": ["json_bytes", "sha256_of", "staged", "write_json"],
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_stay(name: str) -> None:
    module = __import__(name, fromlist=["_"])
    for public in PUBLIC[name]:
        assert getattr(module, public) is not None
        assert getattr(getattr(module, public), "__doc__", "") is not None, f"{name}.{public} says nothing of itself"
