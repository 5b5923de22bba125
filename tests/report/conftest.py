from __future__ import annotations

from pathlib import Path

import made_up
import pytest

from ptlf.report.page import write_report


@pytest.fixture(scope="session")
def page_of_eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight settings on 20 tasks of 200 epochs, 20 units."""
    folder = tmp_path_factory.mktemp("eight")
    assert write_report(made_up.eight(folder / "runs"), folder / "out" / "report.html") == 8
    return folder / "out" / "report.html"
