"""From the name of a model to its path, with a progress bar. Shared by every command that takes a model."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.commands import sigterm_unwinds
from penstock.cli.console import pull_progress
from penstock.cli.environment import cache_dir, hub_token
from penstock.models.hub import ModelHub


def model_hub() -> ModelHub:
    return ModelHub(cache_dir(), hub_token=hub_token())


def fetch_model(name_or_path: str, *, force: bool = False) -> Path:
    """The model's path; a known model that is not here yet is pulled, with a bar."""
    hub = model_hub()
    with pull_progress(name_or_path) as report, sigterm_unwinds():
        if force:
            return hub.pull(name_or_path, report, force=True)
        return hub.ensure(name_or_path, report)
