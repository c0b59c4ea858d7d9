"""A dataset in memory for the tests of prompts."""


class Rows:
    """A dataset as a plug-in would write it: no `where`, and keys may be missing."""

    name = "rows"

    def __init__(self, *rows):
        self._rows = rows
        self.columns = list(dict.fromkeys(name for row in rows for name in row))

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]
