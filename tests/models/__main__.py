"""Makes one model by hand: ``python -m tests.models --arch olmoe --quant Q4_K -o out.gguf``."""

from __future__ import annotations

import argparse
from dataclasses import fields

from .archs import ARCHS
from .generate import describe, make_model, model_files
from .quantize import MIXES, QUANTS
from .spec import ModelSpec


def _list() -> None:
    for row in ARCHS.values():
        variants = ", ".join([*row.layouts, *["scales"] * row.scales])
        print(f"{row.name:<10} {row.quant:<6} {variants:<26} {row.about}")
    print("quants     " + ", ".join((*QUANTS, *MIXES)))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("-o", "--output", help="file to write")
    parser.add_argument("--list", action="store_true", help="list architectures and quantisations")
    parser.add_argument("--lib-dir", help="folder of the ggml-base library")
    for field in fields(ModelSpec):
        name = "--" + field.name.replace("_", "-")
        if field.name == "per_layer_quant":
            parser.add_argument(name, type=lambda s: tuple(s.split(",")), default=(), help="types by layer, with commas")
        elif isinstance(field.default, bool):
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, type=type(field.default), default=field.default)
    args = vars(parser.parse_args())
    output, lib_dir, show = args.pop("output"), args.pop("lib_dir"), args.pop("list")
    if show:
        _list()
        return
    if output is None:
        parser.error("-o is required")
    try:
        path = make_model(output, lib_dir=lib_dir, **args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(f"{path} ({describe(model_files(path))})")


if __name__ == "__main__":
    main()
