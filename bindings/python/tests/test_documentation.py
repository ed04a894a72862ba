"""The examples of doc strings and of the README are run, and the stubs name what there is."""

import ast
import doctest
import inspect
import pathlib
import re
import subprocess
import sys

import ascend_vmm
import pytest

PACKAGE = pathlib.Path(ascend_vmm.__file__).parent


def documented():
    """Every doc string of the package, with a name."""
    yield "ascend_vmm", ascend_vmm.__doc__
    for name in ascend_vmm.__all__:
        thing = getattr(ascend_vmm, name)
        yield name, inspect.getdoc(thing)
        if inspect.isclass(thing) and not issubclass(thing, (Exception, tuple)):
            for member in vars(thing):
                text = getattr(getattr(thing, member), "__doc__", None)
                if not member.startswith("_") and isinstance(text, str):
                    yield f"{name}.{member}", inspect.cleandoc(text)


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
    assert {"Session", "Device", "Host", "Reservation", "Mapping", "HostView", "Ticket", "probe"} <= names
