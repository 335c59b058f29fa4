"""The checkpoint of a module's ``RECIPE``, written by real DeepSpeed once a process, and a copy of it to be damaged."""

import shutil

import pytest

from tests.support import real_zero


@pytest.fixture(scope="session")
def write_once(tmp_path_factory):
    made = {}

    def write(recipe):
        if repr(recipe) not in made:
            made[repr(recipe)] = real_zero.write(tmp_path_factory.mktemp("written"), recipe)
        return made[repr(recipe)]

    return write


@pytest.fixture(scope="module")
def written(request, write_once):
    """What was written of the module's ``RECIPE``; not to be changed."""
    return write_once(request.module.RECIPE)


@pytest.fixture
def run(written, tmp_path):
    """A copy of it in ``tmp_path / "run"``: the folder of its step."""
    shutil.copytree(written.folder, tmp_path / "run")
    return tmp_path / "run" / written.recipe.tag
