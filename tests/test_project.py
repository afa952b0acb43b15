"""What holds the repository together."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def requirements(items):
    """Return package -> version specifier, without the comments of pip's syntax."""
    found = {}
    for item in items:
        text = item.split("#")[0].strip()
        if not text.startswith("-"):
            name, version = re.fullmatch(r"([\w.-]+)(.*)", text).groups()
            found[name] = version
    return found


def test_environment_yml_and_pyproject_name_the_same_packages_and_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = requirements([*project["dependencies"], *extras["cpu"], *extras["notebooks"]])
    text = (ROOT / "environment.yml").read_text()
    conda = yaml.safe_load(text)["dependencies"]
    pip = next(item["pip"] for item in conda if isinstance(item, dict))
    assert requirements(pip) == wanted
    assert f"python{project['requires-python']}" in conda
    # The one commented line that switches to CUDA.
    switch = [line.strip()[4:] for line in text.splitlines() if line.strip().startswith("# - ")]
    assert requirements(switch) == requirements(extras["gpu"][:1])


@pytest.mark.parametrize("room", ["layouts", "checkpoints"])
def test_layouts_and_checkpoints_run_without_vllm_and_transformers(room):
    modules = [f"gptoss_debug.{room}.{file.stem}" for file in (ROOT / "gptoss_debug" / room).glob("[a-z]*.py")]
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert len(modules) > 3
    assert not {"vllm", "transformers"} & set(loaded)


def test_a_recording_is_read_and_compared_without_vllm_and_transformers():
    program = "import sys, gptoss_debug.diagnosis.compare, gptoss_debug.diagnosis.coverage; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"vllm", "transformers"} & set(loaded)


def test_only_engines_import_vllm_and_transformers():
    pattern = re.compile(r"^\s*(?:import|from) (?:vllm|transformers)\b", re.MULTILINE)
    users = {file.parent.name for file in (ROOT / "gptoss_debug").rglob("*.py") if pattern.search(file.read_text())}
    assert users == {"engines"}


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stripped_and_parametrised(path):
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    assert "".join(notebook["cells"][0]["source"]).startswith("# ")
    (parameters,) = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    lines = "".join(parameters["source"]).splitlines()
    assert all(re.fullmatch(r"\w+: \w+ = .+  # .+", line) for line in lines), lines
    assert any("assert " in "".join(cell["source"]) for cell in cells)


def test_modules_are_short():
    for file in (ROOT / "gptoss_debug").rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 400, file
