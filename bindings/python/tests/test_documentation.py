"""The examples of doc strings and of the README are run, and the stubs name what there is."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import ascend_vmm
import pytest
from ascend_vmm import emulate

PACKAGE = pathlib.Path(ascend_vmm.__file__).parent


def modules():
    """Every module of the package, but those that run a program."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "ascend_vmm."):
        if not module.name.endswith("__main__") and "._acl" not in module.name:
            yield importlib.import_module(module.name)


def documented():
    """Every doc string of the package, with a name."""
    yield "ascend_vmm", ascend_vmm.__doc__
    for module in modules():
        yield module.__name__, module.__doc__
        for name, thing in vars(module).items():
            if inspect.isfunction(thing) and not name.startswith(("_", "pytest_")):
                yield f"{module.__name__}.{name}", inspect.getdoc(thing)
    yield "Emulator", inspect.getdoc(emulate.Emulator)
    for name in ascend_vmm.__all__:
        thing = getattr(ascend_vmm, name)
        yield name, inspect.getdoc(thing)
        if inspect.isclass(thing) and not issubclass(thing, (Exception, tuple)):
            for member in vars(thing):
                text = getattr(getattr(thing, member), "__doc__", None)
                if not member.startswith("_") and isinstance(text, str):
                    yield f"{name}.{member}", inspect.cleandoc(text)


# Slots that PyO3 gives a class without a signature, what Python has from 3.12 on only, and a class that
# is made when vLLM is there.
STUBTEST_CANNOT_KNOW = [
    r".*\.__buffer__",
    r"ascend_vmm\._ascend_vmm\.Made",
    r"ascend_vmm\.service\.vllm\.AscendVmmLoader.*",
]

EXAMPLES = [(name, text) for name, text in documented() if text and ">>>" in text]


@pytest.mark.parametrize("name, text", EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_example_does_what_it_says(ascend_npu, name, text):
    test = doctest.DocTestParser().get_doctest(text, dict(vars(ascend_vmm)), name, None, 0)
    failures = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=failures.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(failures)


def test_every_public_thing_has_a_doc_string():
    missing = [name for name, text in documented() if not text]
    assert missing == []


def test_there_are_examples_of_every_noun():
    names = {name.split(".")[0] for name, _ in EXAMPLES}
    nouns = {name for name, thing in vars(ascend_vmm).items() if inspect.isclass(thing)}
    data = {name for name in nouns if dataclasses.is_dataclass(getattr(ascend_vmm, name))}
    errors = {name for name in nouns if issubclass(getattr(ascend_vmm, name), (Exception, tuple))}
    functions = {"probe", "devices", "send", "read_batch", "write_batch"}
    assert (nouns - data - errors) | functions | {"Error", "OutOfMemory"} <= names


def stubs():
    """The functions and classes of the stubs. A class has its methods and those of its bases, which
    only the stubs know."""
    tree = ast.parse((PACKAGE / "_ascend_vmm.pyi").read_text())
    nodes = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}

    def methods(node):
        own = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        return own + [method for base in node.bases for method in methods(nodes[base.id])]

    functions, classes = {}, {}
    for name, node in nodes.items():
        if isinstance(node, ast.FunctionDef):
            functions[name] = node
        elif not name.startswith("_"):
            classes[name] = methods(node)
    return functions, classes


def test_the_stubs_name_what_there_is():
    from ascend_vmm import _ascend_vmm

    functions, classes = stubs()
    there = {name for name in vars(_ascend_vmm) if not name.startswith("_")}
    assert {*functions, *classes} == there
    for name, methods in classes.items():
        public = {member for member in dir(getattr(_ascend_vmm, name)) if not member.startswith("_")}
        assert {method.name for method in methods if not method.name.startswith("_")} == public, name


def test_the_stubs_have_the_same_parameters():
    """The text signatures, which `help` shows, against the stubs."""
    from ascend_vmm import _ascend_vmm

    def names(arguments):
        listed = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
        starred = [one for one in (arguments.vararg, arguments.kwarg) if one]
        return sorted(one.arg for one in listed + starred if one.arg not in ("self", "cls"))

    functions, classes = stubs()
    pairs = [(_ascend_vmm, node) for node in functions.values()]
    for name, methods in classes.items():
        pairs += [(getattr(_ascend_vmm, name), method) for method in methods]
    compared = 0
    for owner, node in pairs:
        # Special methods have no signature, and Python before 3.12 does not show __buffer__.
        if node.name.startswith("_"):
            continue
        thing = getattr(owner, node.name)
        if not getattr(thing, "__text_signature__", None):
            continue
        parameters = inspect.signature(thing).parameters
        there = sorted(name for name in parameters if name not in ("self", "cls"))
        assert names(node.args) == there, f"{owner}.{node.name}"
        compared += 1
    assert compared > 60


@pytest.mark.parametrize("name", ["acl", "acl.rt", "acl.util"])
def test_the_stubs_of_acl_have_its_functions_and_their_parameters(name):
    module = importlib.import_module(f"ascend_vmm.{name}")
    path = pathlib.Path(module.__file__).with_suffix(".pyi")
    stubs = {node.name: node.args for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    there = {name: thing for name, thing in vars(module).items() if inspect.isfunction(thing) and name[0] != "_"}
    assert set(stubs) == set(there)
    for function, arguments in stubs.items():
        parameters = list(inspect.signature(there[function]).parameters.values())
        assert arguments.args == [], f"{function}: the vendor's functions take no names"
        names = [argument.arg for argument in [*arguments.posonlyargs, arguments.vararg] if argument]
        assert names == [parameter.name for parameter in parameters], function
        assert all(parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL) for parameter in parameters)


def test_a_type_checker_finds_nothing_in_the_stubs(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    environment = {**os.environ, "MYPYPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-m", "mypy.stubtest", "--ignore-missing-stub", "--concise", "ascend_vmm"]
    allowed = tmp_path / "allowed"
    allowed.write_text("\n".join(STUBTEST_CANNOT_KNOW))
    command += ["--allowlist", str(allowed), "--ignore-unused-allowlist"]
    # stubtest puts its cache into the working directory, whatever the environment says.
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "readme, expected",
    [
        # The manual's seven steps, sharing with another process, tests, and the steps as the manual
        # spells them.
        ("README.md", ["b'hello, NPU' 0x", "b'shared'", "3 passed", "2 passed", "b'hello, NPU' 0x"]),
        ("../../README.md", ["b'hello, NPU'", "b'hello, NPU'"]),
    ],
)
def test_the_programs_of_the_readme_print_what_they_should(tmp_path, readme, expected):
    path = pathlib.Path(__file__).parent.parent / readme
    if not path.exists():
        pytest.skip("these tests run without the project's files")
    programs = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert len(programs) == len(expected)
    for program, text in zip(programs, expected):
        file = tmp_path / "program.py"
        file.write_text(program)
        run = ["-m", "pytest", "-p", "no:cacheprovider"] if "def test_" in program else []
        emulate = [] if run else [sys.executable, "-m", "ascend_vmm.emulate", "--"]
        command = [*emulate, sys.executable, *run, str(file)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
        assert result.returncode == 0 and text in result.stdout, result.stdout


def test_the_extra_is_the_same_module_in_the_same_version():
    project = pathlib.Path(__file__).parent.parent
    if not (project / "extra").exists():
        pytest.skip("these tests run without the project's files")
    installed = (PACKAGE / "_acl" / "acl" / "__init__.py").read_text()
    assert (project / "extra" / "acl" / "__init__.py").read_text() == installed
    text = (project / "extra" / "pyproject.toml").read_text() + (project / "pyproject.toml").read_text()
    versions = re.findall(r'(?:^version = "|ascend-vmm(?:-acl)?==)([^"]+)"', text, re.MULTILINE)
    assert len(versions) == 3 and set(versions) == {ascend_vmm.__version__}
