"""The id of a run in a service, kept in the run's directory so that a resumed run continues its entry."""

from __future__ import annotations

from pathlib import Path


def kept_id(file: Path, resume_step: int | None) -> str:
    """Return the id in a file, or "" for a run that starts from scratch."""
    return file.read_text().strip() if resume_step is not None and file.is_file() else ""
