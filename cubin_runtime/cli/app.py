"""The verbs put together, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import importlib
import logging
import sys

import typer

from cubin_runtime.errors import CubinRuntimeError

_HELP = "Precompiled GPU attention kernels: what exists, which one a call gets, and whether it is sound."

# Where each verb is, as a function or as an app of its own; in the order of the help text.
_VERBS = {
    "run": "run.run",
    "list": "list.list_kernels",
    "show": "show.show",
    "explain": "explain.explain",
    "verify": "verify.verify",
    "fetch": "fetch.fetch",
    "bundle": "bundle.bundle",
    "cache": "cache.cache",
    "doctor": "doctor.doctor",
}


def run(arguments: list[str] | None = None) -> None:
    """Runs one command (default: the process's arguments); ends in SystemExit with its code."""
    from cubin_runtime.settings import logger, settings

    logging.basicConfig(format="%(levelname)s: %(message)s")
    logger.setLevel(settings.log_level)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        _make_app(words)(args=words, prog_name="cubin-runtime")
    except CubinRuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _make_app(words: list[str]) -> typer.Typer:
    """The app with the verb that these words begin with, else with all, as they are slow to import."""
    app = typer.Typer(
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # rich takes longer to import than all of this
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # else an app of one verb takes no verb
    for verb in [words[0]] if words and words[0] in _VERBS else _VERBS:
        module, _, name = _VERBS[verb].partition(".")
        found = getattr(importlib.import_module(f"cubin_runtime.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb)
        else:
            app.command(verb)(found)
    return app
