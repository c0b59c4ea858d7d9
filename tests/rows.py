"""A dataset in memory for the tests of prompts."""


class Rows:
    """Minimal dataset of a plugin: no `where`, and rows may lack keys."""

    name = "rows"

    def __init__(self, *rows):
        self._rows = rows
        self.columns = list(dict.fromkeys(name for row in rows for name in row))

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]
