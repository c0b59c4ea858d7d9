"""Tables of docs/migrate.md."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.skipif(not DOCS.is_dir(), reason="needs the repository")
def test_tables_of_keys_are_current():
    spec = spec_from_file_location("make_migrate", DOCS / "make_migrate.py")
    make = module_from_spec(spec)
    spec.loader.exec_module(make)

    page = make.page()

    assert (DOCS / "migrate.md").read_text() == page, "type  python docs/make_migrate.py"
    assert page.count("| `actor_rollout_ref.") + page.count("| `data.") + page.count("| `trainer.") > 50
    assert page.count(" |\n| `") > 130
    assert "not in the table" not in page
    assert [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []
