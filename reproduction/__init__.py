"""The paper's tables and figures, with ours in them: `python -m reproduction TABLE`."""
