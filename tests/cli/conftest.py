"""What the tests of the command line share."""

import io
import sys

import pytest

from ullage.cli import main


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls the command line in this process: (status, standard output, standard error)."""

    def call(*arguments, stdin=b""):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["ullage", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
        return status, *capsys.readouterr()

    return call
