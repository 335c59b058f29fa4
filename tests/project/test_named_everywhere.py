"""What is added to a registry is named on the pages and in the help that list what there is."""

import dataclasses

import pytest

import ullage.training.trl
from maintenance.models_page import verdicts
from tests.support.launch import ROOT
from ullage.cli.train import ModelArguments
from ullage.models import RecurrentConfig
from ullage.models.cells import CELLS

DOCS = ROOT / "docs"


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_is_named_wherever_cells_are_listed(cell):
    (model,) = (field for field in dataclasses.fields(ModelArguments) if field.name == "model")
    assert cell in model.metadata["help"].replace("(", " ").replace(",", " ").split()
    assert cell in (RecurrentConfig.__doc__ or "").replace(",", " ").split()
    for page in ("recurrent.md", "command.md"):
        assert f"`{cell}`" in (DOCS / page).read_text(), page
    assert verdicts((DOCS / "models.md").read_text())["recurrent"][cell] == "exact", "make models"


@pytest.mark.parametrize("trainer", [name for name in ullage.training.trl.__all__ if name.endswith("Trainer")])
def test_a_trainer_of_trls_is_named_where_they_are_listed(trainer):
    assert trainer in (DOCS / "coming_from" / "trl.md").read_text()
    contract = (DOCS / "reference" / "contract.md").read_text()
    assert all(f"`ullage.training.trl.{name}`" in contract for name in (trainer, trainer.replace("Trainer", "Config")))
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "training.md"):
        (row,) = (line for line in page.read_text().splitlines() if line.startswith("| [TRL]"))
        assert trainer.removesuffix("Trainer").lower() in row.lower(), page
