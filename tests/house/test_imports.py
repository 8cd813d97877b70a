"""Who may import whom, in Python and in C++: the two tables of the architecture, executed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pyquant"

# package -> what it may import besides itself. Data flows one way: from the left of this table to the right.
MAY_IMPORT = {
    "errors": set(),
    "core": {"errors"},
    "numerics": {"errors", "core"},
    "ops": {"errors", "core", "numerics", "io", "_native"},  # of io: the bounded reader of tuned.json
    "calibrate": {"errors", "core", "numerics", "ops", "io"},  # of io: files that are whole at any moment
    "nn": {"errors", "core", "numerics", "ops", "calibrate"},
    "simulate": {"errors", "core", "numerics", "ops", "nn", "calibrate"},
    "recipe": {"errors", "core", "nn", "io"},
    "ptq": {"errors", "core", "numerics", "ops", "nn", "calibrate", "simulate", "recipe", "io"},
    "ptq.shards": {"errors", "core", "nn", "calibrate", "simulate", "recipe", "ptq", "io", "io.pretrained"},
    "qat": {"errors", "core", "numerics", "ops", "nn", "calibrate", "simulate", "recipe"},
    "io": {"errors", "core"},
    "io.pretrained": {"errors", "core", "nn", "io", "integrations.transformers"},  # the last inside functions alone
    "integrations": {"errors", "core", "nn", "io", "integrations.transformers", "ptq", "recipe"},
    "integrations.pytorch_quantization": {"*"},  # pyquant.compat: whole tools under other names
    "integrations.super_gradients": {"*"},
    "integrations.vllm": {"errors", "core", "numerics", "nn", "io"},
    "integrations.sglang": {"errors", "integrations.vllm"},  # what runs in a joined layer, which knows no vLLM
    "integrations.compile": {"errors", "core", "ops", "nn"},
    "integrations.onnx": {"errors", "core", "numerics", "nn", "simulate", "report.records"},
    "integrations.transformers": {
        "errors",
        "core",
        "nn",
        "io",
        "io.pretrained",
        "integrations",
        "integrations.distributed",  # inside functions alone
    },
    "integrations.distributed": {"errors", "core", "numerics", "ops", "nn", "io", "io.pretrained"},
    "integrations.peft": {"errors", "core", "ops", "nn"},
    "integrations.diffusers": {"errors", "nn", "integrations"},
    "report.records": {"errors", "core", "io"},  # of io: files that are whole at any moment; of core: paths
    "measure": {"errors", "core", "numerics", "ops", "nn", "report.records", "_native"},
    "bench": {"errors", "core", "numerics", "ops", "nn", "io", "calibrate", "report.records", "measure", "_native"},
    # Which layer in which precision. A folder that has its own line is a unit of its own.
    "mixed_precision.choices": {
        "errors",
        "core",
        "nn",
        "calibrate",
        "simulate",
        "recipe",
        "ptq",
        "io",
        "report.records",
    },
    "mixed_precision.loss": {
        "errors",
        "core",
        "ops",
        "nn",
        "calibrate",
        "simulate",
        "measure",
        "report.records",
        "mixed_precision.choices",
        "mixed_precision.ledger",
    },
    "mixed_precision.latency": {"errors", "core", "nn", "measure", "report.records", "mixed_precision.choices"},
    "mixed_precision.solve": {"errors", "core", "io", "report.records"},  # pure: tables and callables, no tensor
    "mixed_precision.ledger": {"errors", "io", "mixed_precision.spread"},
    "mixed_precision.spread": {"errors"},
    "mixed_precision": {"*"},  # search() as users call it: all of the above and reports
    "diagnosis": {"errors", "core", "ops", "nn", "measure", "bench", "report.records", "report", "_native"},  # doctor()
    "float_matrices": {"errors", "nn", "integrations"},
    "report": {"errors", "core", "io", "report.records"},
    "cli": {"*"},
    "compat": {"*"},
    "__init__": {"*"},
    "__main__": {"cli"},
}
# The PTX simulator (tools/ptxsim/src). What the machine asks of an instruction stands in machine/schedule.h.
SIMULATOR_MAY_INCLUDE = {
    "ptx": {"ptx"},
    "machine": {"ptx", "machine"},
    "translate": {"ptx", "machine", "translate"},
    "instructions": {"ptx", "machine", "translate", "instructions"},
    "runtime": {"ptx", "machine", "runtime"},
}
NEVER = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}

C_MAY_INCLUDE = {
    "core": {"core"},
    "plan": {"core", "plan"},
    "cpu": {"core", "plan", "cpu"},
    "cuda": {"core", "plan", "cuda"},
    "bind": {"core", "plan", "cpu", "cuda", "bind"},
    "native": {"core", "plan", "cpu", "cuda", "native"},
}


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path) -> str:
    return unit_named(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def unit_named(name: str) -> str:
    """The unit of the table that a module belongs to: a folder, or a subfolder with a line of its own."""
    folder = ".".join(name.split(".")[:2])
    return folder if folder in MAY_IMPORT else name.split(".")[0]


def imported_units(path: Path) -> set[str]:
    units: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        units |= {unit_named(name.removeprefix("pyquant.")) for name in names if name.startswith("pyquant.")}
    return units


def test_drivers_and_tools_import_names_that_exist() -> None:
    """No type checker reads these folders, and most of their files are run by people alone."""
    missing = []
    for path in sorted(path for folder in ("bench", "tools", "examples") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pyquant":
                for alias in node.names:
                    if not _exists(str(node.module), alias.name):
                        missing.append(f"{path.relative_to(ROOT)}: {node.module}.{alias.name}")
    assert not missing, "\n".join(missing)


# Names of transformers that both the newest version and vLLM's has (5.19). Who adds one runs `make nightly-vllm`.
OF_TRANSFORMERS = """
    AutoConfig
    AutoTokenizer
    PreTrainedModel
    conversion_mapping.get_model_conversion_mapping
    core_model_loading.WeightConverter
    core_model_loading.WeightRenaming
    core_model_loading.build_glob_alternation
    core_model_loading.dot_natural_key
    core_model_loading.rename_source_key
    core_model_loading.revert_weight_conversion
    distributed.tensor_parallel.MlaKvAProjParallel
    distributed.tensor_parallel.replace_layer_number_by_wildcard
    quantizers.auto
    quantizers.base.HfQuantizer
    quantizers.quantizer_compressed_tensors.CompressedTensorsHfQuantizer
    utils.logging
    utils.quantization_config.CompressedTensorsConfig
    utils.quantization_config.QuantizationConfigMixin
"""


def test_names_of_transformers_are_those_of_every_version_that_is_run() -> None:
    """One that vLLM's transformers lacked came in unseen: no test of every change has that version."""
    found = set()
    for path in (ROOT / "pyquant").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
                found |= {f"{node.module}.{alias.name}".removeprefix("transformers.") for alias in node.names}
    assert found == set(OF_TRANSFORMERS.split())


def _exists(module: str, name: str) -> bool:
    spec = f"{module}.{name}"
    if f'Extension("{spec}"' in (ROOT / "setup.py").read_text():
        return True  # these checks come before the build: a compiled module need not be there yet
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(spec) is not None


def test_python_imports_follow_the_table() -> None:
    files = python_files()
    assert len(files) > 20
    wrong = []
    for path in files:
        unit = unit_of(path)
        assert unit in MAY_IMPORT, f"{path.relative_to(ROOT)}: add '{unit}' to the table"
        allowed = MAY_IMPORT[unit]
        if "*" in allowed:
            continue
        wrong += [
            f"{path.relative_to(ROOT)} imports pyquant.{name}"
            for name in sorted(imported_units(path) - allowed - {unit} - set(_public_names(unit)))
        ]
    assert not wrong, "\n".join(wrong)


def _public_names(unit: str) -> list[str]:
    return ["__version__"] if unit != "core" else []


def test_the_import_table_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from pyquant.nn.qlinear import QLinear\nimport pyquant.ops\n")
    assert imported_units(bad) == {"nn", "ops"}
    assert not imported_units(bad) <= MAY_IMPORT["io"]
    bad.write_text("from pyquant.mixed_precision import latency\nimport pyquant.mixed_precision.plan\n")
    assert imported_units(bad) == {"mixed_precision.latency", "mixed_precision"}


def _c_files(root: Path = ROOT / "csrc") -> list[Path]:
    return [p for p in sorted(root.rglob("*")) if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]


@pytest.mark.parametrize(
    ("root", "table"), [("csrc", C_MAY_INCLUDE), ("tools/ptxsim/src", SIMULATOR_MAY_INCLUDE)], ids=["csrc", "ptxsim"]
)
def test_c_includes_follow_the_table(root: str, table: dict[str, set[str]]) -> None:
    wrong = []
    files = [path for path in _c_files(ROOT / root) if path.parent != ROOT / root]
    assert len(files) > 30
    for path in files:
        layer = path.relative_to(ROOT / root).parts[0]
        for name in re.findall(r'#include "([a-z_0-9]+)/', path.read_text()):
            if name in table and name not in table[layer]:
                wrong.append(f"{path.relative_to(ROOT)} includes {name}/")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (r"#include <torch/", "bind"),
        (r"#include [<\"](cuda_runtime|cuda\.h|cuda_fp16|cuda_bf16|cutlass/|cute/)", "cuda"),
        (r"#include <pybind11/", "native"),
    ],
)
def test_foreign_headers_stay_in_their_folder(pattern: str, home: str) -> None:
    found = {p.relative_to(ROOT / "csrc").parts[0] for p in _c_files() if re.search(pattern, p.read_text())}
    assert found <= {home}, f"{pattern} outside csrc/{home}: {found}"


def test_only_launch_h_launches() -> None:
    pattern = re.compile(r"<<<|cudaLaunchKernel|cudaFuncSetAttribute|cudaMalloc\b|cudaSetDevice|cudaGetLastError")
    code = {p: re.sub(r"//[^\n]*", "", p.read_text()) for p in _c_files()}
    users = {str(p.relative_to(ROOT / "csrc/cuda")) for p, text in code.items() if pattern.search(text)}
    assert users <= {"launch.h"}, f"launches outside csrc/cuda/launch.h: {users - {'launch.h'}}"


def test_nothing_dangerous_in_the_package() -> None:
    wrong = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                wrong += [f"{where} imports {n}" for n in names if n.split(".")[0] in NEVER]
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in {"eval", "exec", "torch.load", "yaml.load", "os.system"}:
                    wrong.append(f"{where} calls {name}")
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{where} bare except")
            if isinstance(node, ast.Assert):
                wrong.append(f"{where} assert as validation")
    assert not wrong, "\n".join(wrong)


def test_one_topic_one_folder() -> None:
    folders = sorted({path.relative_to(PACKAGE).parts[0] for path in python_files() if path.parent != PACKAGE})
    assert len(folders) <= 16, f"a new folder under pyquant is a new topic: {folders}"
