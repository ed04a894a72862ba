"""What the tests share. Every test that takes `ascend_npu` runs on each driver generation, unless it
says otherwise."""

import pytest

pytest_plugins = ["pytester"]

MIB = 1 << 20
GIB = 1 << 30


def pytest_collection_modifyitems(items):
    for item in items:
        if "ascend_npu" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.emulated)


def pytest_configure(config):
    config.addinivalue_line("markers", "emulated: runs on an emulated driver")


@pytest.fixture
def session(ascend_npu):
    """A session of the test's process, closed at the end."""
    import ascend_vmm

    with ascend_vmm.Session() as session:
        yield session


@pytest.fixture
def mapping(session):
    """4 MiB of device 0, mapped."""
    return session.reserve("4MiB").map(session.device(0).create("4MiB"))
