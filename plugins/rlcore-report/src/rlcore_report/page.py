"""Assemble the page: one HTML file that contains its style, scripts and data, and loads nothing else."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

from rlcore_report.payload import payload
from rlcore_report.run import RecordedRun

MOST_BYTES = 5_000_000
"""Maximum size of a page with a few runs, in bytes."""
_SAMPLE_BYTES = 8_000_000
"""First limit on samples, before compression; halved until the page is small enough."""
_STYLES = ("uplot/uPlot.min.css", "style.css")
_SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "base.js",
    "charts.js",
    "overview.js",
    "metrics.js",
    "samples.js",
    "more.js",
    "main.js",
)


def page(runs: Sequence[RecordedRun]) -> str:
    """Return the page of one or several runs, of at most MOST_BYTES if samples are what makes it larger."""
    limit = _SAMPLE_BYTES
    while True:
        data = packed(payload(runs, most_sample_bytes=limit))
        text = document(", ".join(run.name for run in runs), base64.b64encode(data).decode())
        if len(text) <= MOST_BYTES or limit < 1000:
            return text
        limit //= 2


def packed(data: Mapping[str, Any]) -> bytes:
    """Return data as gzipped JSON."""
    return gzip.compress(json.dumps(data, separators=(",", ":"), default=str).encode(), mtime=0)


def document(title: str, data: str, *, live: str = "") -> str:
    """Return the HTML document; with `live`, it reads its data from that address instead."""
    style, script = _joined(_STYLES), _joined(_SCRIPTS)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    text = Template(_read("page.html")).substitute(
        policy=policy + ("; connect-src 'self'" if live else ""),
        title=html.escape(title),
        style=style,
        script=script,
        data=data,
    )
    return text.replace('<html lang="en">', f'<html lang="en" data-live="{html.escape(live)}">', 1) if live else text


def _hash(text: str) -> str:
    """Return the source expression of a content security policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _joined(names: Sequence[str]) -> str:
    return "\n".join(_read(name) for name in names)


def _read(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")
