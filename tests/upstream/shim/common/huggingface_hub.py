"""Stands in for the hub client: nothing is downloaded.

A file that one of our generated models can stand for is served from the mapping in HOTMOE_SUITE_MODELS; a test that wants
another file is skipped, with the name of that file.
"""

from __future__ import annotations

import json
import os

import pytest


def hf_hub_download(repo_id: str, filename: str) -> str:
    """Return the path of the stand-in, or skip the test."""
    models = json.loads(os.environ["HOTMOE_SUITE_MODELS"])
    if filename not in models:
        pytest.skip(f"needs a download: {repo_id}/{filename}")
    return str(models[filename])
