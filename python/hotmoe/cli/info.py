"""`hotmoe info`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__, devices
from ..cache import admissions, policies, tier_managers
from ..model_file import ModelFile, read_model_file
from ..plan import format_bytes


def show_info(model: Path | None, sim: tuple[int, int] | None, *, as_json: bool) -> None:
    """Print versions, devices, policies, and what a model file says about itself.

    Args:
        model: A GGUF file, or None.
        sim: Simulated devices to load first: (number, MiB of each).
        as_json: Print one JSON object instead of tables.
    """
    if sim:
        from .. import sim as simulator

        simulator.load(*sim)
    versions = _versions()
    found = devices.list_devices()
    file = read_model_file(model) if model else None
    if as_json:
        out: dict[str, Any] = {
            "versions": versions,
            "devices": [dataclasses.asdict(device) for device in found],
            "policies": policies(),
            "admissions": admissions(),
            "tier_managers": tier_managers(),
        }
        if file:
            out["model"] = {**dataclasses.asdict(file), "slot_bytes": file.slot_bytes}
        print(json.dumps(out, indent=2))
        return

    console = Console(highlight=False)
    for name, version in versions.items():
        console.print(f"{name:<18} {version}")
    table = Table("device", "description", "type", "memory", "free", title="Devices", title_justify="left")
    for device in found:
        kind = f"{device.type}, simulated" if device.simulated else device.type
        table.add_row(device.name, device.description, kind, format_bytes(device.memory_total), format_bytes(device.memory_free))
    console.print(table)
    named = {"Eviction policies": policies(), "Admission policies": admissions(), "Tier managers": tier_managers()}
    for title, names in named.items():
        table = Table("name", "description", title=title, title_justify="left")
        for name, description in names.items():
            table.add_row(escape(name), escape(description))
        console.print(table)
    if file:
        console.print(_model_table(file))


def _versions() -> dict[str, str]:
    from .._binding import lib, text

    return {
        "hotmoe": __version__,
        "C API": str(lib.hotmoe_api_version()),
        "llama-cpp-python": text(lib.hotmoe_llama_cpp_python_version()),
        "llama.cpp": text(lib.hotmoe_llama_cpp_commit()),
    }


def _model_table(file: ModelFile) -> Table:
    table = Table(show_header=False, title=Path(file.path).name, title_justify="left")
    rows = {
        "name": file.name or "-",
        "architecture": file.architecture or "-",
        "files": str(len(file.files)),
        "layers": f"{file.n_layers}, {file.n_expert_layers} with experts",
        "experts": f"{file.n_expert} per layer, {file.n_expert_used} used per token" if file.n_expert else "none",
        "trained context": f"{file.n_ctx_train} tokens",
        "weights": format_bytes(file.tensor_bytes),
    }
    if file.n_expert:
        types = ", ".join(f"{name} ({n})" for name, n in file.expert_types.items())
        share = file.expert_bytes / file.tensor_bytes if file.tensor_bytes else 0.0
        rows["expert weights"] = f"{format_bytes(file.expert_bytes)} ({share:.0%}), {types}"
        rows["one slot"] = f"{format_bytes(file.slot_bytes)} (one more expert of every layer)"
    for name, value in rows.items():
        table.add_row(name, value)
    return table
